import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.elasticsearch.action.ActionListener;
import org.elasticsearch.common.bytes.BytesArray;
import org.elasticsearch.common.network.NetworkService;
import org.elasticsearch.common.settings.Settings;
import org.elasticsearch.common.util.BigArrays;
import org.elasticsearch.common.xcontent.NamedXContentRegistry;
import org.elasticsearch.http.AbstractHttpServerTransport;
import org.elasticsearch.http.HttpServerChannel;
import org.elasticsearch.threadpool.ThreadPool;

/**
 * The server's REST layer behind the HTTP server of the JDK.
 *
 * Clients of version 8 and 9 name their media types after a version this server never heard of. They are mapped to the
 * plain ones here, unless `-Dplain` is set, which leaves the server as it was: such clients then refuse it.
 */
final class LoopbackHttp extends AbstractHttpServerTransport {
    static final boolean MODERN_CLIENTS = !Boolean.getBoolean("plain");
    private static final int BACKLOG = 1_024;
    private static volatile int port;

    private final ExecutorService threads = Executors.newCachedThreadPool(task -> {
        Thread thread = new Thread(task, "loopback-http");
        thread.setDaemon(true);
        return thread;
    });

    LoopbackHttp(
        Settings settings, NetworkService network, BigArrays arrays, ThreadPool pool, NamedXContentRegistry contents,
        Dispatcher dispatcher
    ) {
        super(settings, network, arrays, pool, contents, dispatcher);
    }

    static int boundPort() {
        return port;
    }

    @Override
    protected void doStart() {
        bindServer();
    }

    @Override
    protected HttpServerChannel bind(InetSocketAddress address) throws IOException {
        HttpServer server = HttpServer.create(address, BACKLOG);
        server.setExecutor(threads);
        server.createContext("/", this::handle);
        server.start();
        port = server.getAddress().getPort();
        return new ServerChannel(server);
    }

    @Override
    protected void stopInternal() {
        threads.shutdown();
    }

    private void handle(HttpExchange exchange) throws IOException {
        byte[] body = exchange.getRequestBody().readAllBytes();
        Map<String, List<String>> headers = new TreeMap<>(String.CASE_INSENSITIVE_ORDER);
        exchange.getRequestHeaders().forEach((name, values) -> headers.put(name, new ArrayList<>(values)));
        if (MODERN_CLIENTS) {
            for (String name : new String[] {"Accept", "Content-Type"}) {
                headers.computeIfPresent(name, (key, values) -> {
                    values.replaceAll(LoopbackHttp::plainMediaType);
                    return values;
                });
            }
        }
        Exchange channel = new Exchange(exchange);
        serverAcceptedChannel(channel);
        incomingRequest(new Exchange.Request(exchange, new BytesArray(body), headers), channel);
        channel.awaitResponse();
    }

    private static String plainMediaType(String value) {
        if (!value.contains("application/vnd.elasticsearch+")) {
            return value;
        }
        return value.contains("x-ndjson") ? "application/x-ndjson" : "application/json";
    }

    private static final class ServerChannel implements HttpServerChannel {
        private final HttpServer server;
        private boolean open = true;

        ServerChannel(HttpServer server) {
            this.server = server;
        }

        @Override
        public InetSocketAddress getLocalAddress() {
            return server.getAddress();
        }

        @Override
        public void close() {
            if (open) {
                open = false;
                server.stop(0);
            }
        }

        @Override
        public void addCloseListener(ActionListener<Void> listener) {}

        @Override
        public boolean isOpen() {
            return open;
        }
    }
}
