import com.sun.net.httpserver.HttpExchange;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import org.elasticsearch.action.ActionListener;
import org.elasticsearch.common.bytes.BytesReference;
import org.elasticsearch.http.HttpChannel;
import org.elasticsearch.http.HttpRequest;
import org.elasticsearch.http.HttpResponse;
import org.elasticsearch.rest.RestRequest;
import org.elasticsearch.rest.RestStatus;

/** One request and its response, as the server's REST layer sees them. */
final class Exchange implements HttpChannel {
    private final HttpExchange exchange;
    private final CountDownLatch answered = new CountDownLatch(1);
    private final List<ActionListener<Void>> listeners = new CopyOnWriteArrayList<>();
    private volatile boolean open = true;

    Exchange(HttpExchange exchange) {
        this.exchange = exchange;
    }

    void awaitResponse() {
        try {
            answered.await();
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
        }
    }

    @Override
    public void sendResponse(HttpResponse response, ActionListener<Void> listener) {
        Response answer = (Response) response;
        try {
            byte[] body = BytesReference.toBytes(answer.content);
            answer.headers.forEach((name, values) -> {
                if (!name.equalsIgnoreCase("Content-Length")) {
                    exchange.getResponseHeaders().put(name, values);
                }
            });
            if (LoopbackHttp.MODERN_CLIENTS) {
                // True of this server, which is too old to say so itself.
                exchange.getResponseHeaders().set("X-Elastic-Product", "Elasticsearch");
            }
            boolean hasBody = body.length > 0 && !exchange.getRequestMethod().equals("HEAD");
            exchange.sendResponseHeaders(answer.status.getStatus(), hasBody ? body.length : -1);
            if (hasBody) {
                exchange.getResponseBody().write(body);
            }
            exchange.close();
            listener.onResponse(null);
        } catch (Exception failure) {
            listener.onFailure(failure);
        } finally {
            close();
        }
    }

    @Override
    public InetSocketAddress getLocalAddress() {
        return exchange.getLocalAddress();
    }

    @Override
    public InetSocketAddress getRemoteAddress() {
        return exchange.getRemoteAddress();
    }

    @Override
    public void addCloseListener(ActionListener<Void> listener) {
        listeners.add(listener);
        if (!open) {
            listener.onResponse(null);
        }
    }

    @Override
    public boolean isOpen() {
        return open;
    }

    @Override
    public void close() {
        if (open) {
            open = false;
            listeners.forEach(listener -> listener.onResponse(null));
            answered.countDown();
        }
    }

    static final class Request implements HttpRequest {
        private final HttpExchange exchange;
        private final BytesReference body;
        private final Map<String, List<String>> headers;

        Request(HttpExchange exchange, BytesReference body, Map<String, List<String>> headers) {
            this.exchange = exchange;
            this.body = body;
            this.headers = headers;
        }

        @Override
        public RestRequest.Method method() {
            return RestRequest.Method.valueOf(exchange.getRequestMethod());
        }

        @Override
        public String uri() {
            return exchange.getRequestURI().toString();
        }

        @Override
        public BytesReference content() {
            return body;
        }

        @Override
        public Map<String, List<String>> getHeaders() {
            return headers;
        }

        @Override
        public List<String> strictCookies() {
            return Collections.emptyList();
        }

        @Override
        public HttpVersion protocolVersion() {
            return HttpVersion.HTTP_1_1;
        }

        @Override
        public HttpRequest removeHeader(String name) {
            Map<String, List<String>> remaining = new TreeMap<>(String.CASE_INSENSITIVE_ORDER);
            remaining.putAll(headers);
            remaining.remove(name);
            return new Request(exchange, body, remaining);
        }

        @Override
        public HttpResponse createResponse(RestStatus status, BytesReference content) {
            return new Response(status, content);
        }
    }

    private static final class Response implements HttpResponse {
        private final RestStatus status;
        private final BytesReference content;
        private final Map<String, List<String>> headers = new LinkedHashMap<>();

        Response(RestStatus status, BytesReference content) {
            this.status = status;
            this.content = content;
        }

        @Override
        public void addHeader(String name, String value) {
            headers.computeIfAbsent(name, key -> new ArrayList<>()).add(value);
        }

        @Override
        public boolean containsHeader(String name) {
            return headers.containsKey(name);
        }
    }
}
