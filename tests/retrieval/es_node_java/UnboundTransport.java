import java.net.InetAddress;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.elasticsearch.action.ActionListener;
import org.elasticsearch.cluster.node.DiscoveryNode;
import org.elasticsearch.common.component.AbstractLifecycleComponent;
import org.elasticsearch.common.lease.Releasable;
import org.elasticsearch.common.transport.BoundTransportAddress;
import org.elasticsearch.common.transport.TransportAddress;
import org.elasticsearch.transport.ConnectTransportException;
import org.elasticsearch.transport.ConnectionProfile;
import org.elasticsearch.transport.RequestHandlerRegistry;
import org.elasticsearch.transport.Transport;
import org.elasticsearch.transport.TransportMessageListener;
import org.elasticsearch.transport.TransportRequest;
import org.elasticsearch.transport.TransportStats;

/** Transport of a cluster of one: binds no port, connects to nobody; the node talks to itself above this layer. */
final class UnboundTransport extends AbstractLifecycleComponent implements Transport {
    private final Map<String, RequestHandlerRegistry<?>> handlers = new ConcurrentHashMap<>();
    private final ResponseHandlers responses = new ResponseHandlers();
    private final TransportAddress address = new TransportAddress(InetAddress.getLoopbackAddress(), 9300);

    @Override
    protected void doStart() {}

    @Override
    protected void doStop() {}

    @Override
    protected void doClose() {}

    @Override
    public <R extends TransportRequest> void registerRequestHandler(RequestHandlerRegistry<R> handler) {
        if (handlers.putIfAbsent(handler.getAction(), handler) != null) {
            throw new IllegalArgumentException("action registered twice: " + handler.getAction());
        }
    }

    @Override
    @SuppressWarnings({"rawtypes", "unchecked"})
    public RequestHandlerRegistry<? extends TransportRequest> getRequestHandler(String action) {
        return (RequestHandlerRegistry) handlers.get(action);
    }

    @Override
    public void addMessageListener(TransportMessageListener listener) {}

    @Override
    public boolean removeMessageListener(TransportMessageListener listener) {
        return true;
    }

    @Override
    public BoundTransportAddress boundAddress() {
        return new BoundTransportAddress(new TransportAddress[] {address}, address);
    }

    @Override
    public Map<String, BoundTransportAddress> profileBoundAddresses() {
        return Collections.emptyMap();
    }

    @Override
    public TransportAddress[] addressesFromString(String text, int limit) {
        return new TransportAddress[0];
    }

    @Override
    public List<String> getLocalAddresses() {
        return Collections.emptyList();
    }

    @Override
    public Releasable openConnection(
        DiscoveryNode node, ConnectionProfile profile, ActionListener<Transport.Connection> listener
    ) {
        listener.onFailure(new ConnectTransportException(node, "this node has no transport"));
        return () -> {};
    }

    @Override
    public TransportStats getStats() {
        return new TransportStats(0, 0, 0, 0, 0);
    }

    @Override
    public ResponseHandlers getResponseHandlers() {
        return responses;
    }
}
