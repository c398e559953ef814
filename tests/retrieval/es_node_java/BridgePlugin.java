import java.util.Collections;
import java.util.Map;
import java.util.function.Supplier;
import org.apache.lucene.analysis.Analyzer;
import org.apache.lucene.analysis.en.EnglishAnalyzer;
import org.elasticsearch.common.io.stream.NamedWriteableRegistry;
import org.elasticsearch.common.network.NetworkService;
import org.elasticsearch.common.settings.Settings;
import org.elasticsearch.common.util.BigArrays;
import org.elasticsearch.common.util.PageCacheRecycler;
import org.elasticsearch.common.xcontent.NamedXContentRegistry;
import org.elasticsearch.http.HttpServerTransport;
import org.elasticsearch.index.analysis.AbstractIndexAnalyzerProvider;
import org.elasticsearch.index.analysis.AnalyzerProvider;
import org.elasticsearch.indices.analysis.AnalysisModule;
import org.elasticsearch.indices.breaker.CircuitBreakerService;
import org.elasticsearch.plugins.AnalysisPlugin;
import org.elasticsearch.plugins.NetworkPlugin;
import org.elasticsearch.plugins.Plugin;
import org.elasticsearch.threadpool.ThreadPool;
import org.elasticsearch.transport.Transport;

/** What the server jar lacks: a way in by HTTP, a transport for a node alone, and Lucene's `english` analyzer. */
public final class BridgePlugin extends Plugin implements NetworkPlugin, AnalysisPlugin {
    static final String TRANSPORT = "unbound";
    static final String HTTP = "loopback";

    @Override
    public Map<String, Supplier<Transport>> getTransports(
        Settings settings, ThreadPool threads, PageCacheRecycler pages, CircuitBreakerService breakers,
        NamedWriteableRegistry writeables, NetworkService network
    ) {
        return Collections.singletonMap(TRANSPORT, UnboundTransport::new);
    }

    @Override
    public Map<String, Supplier<HttpServerTransport>> getHttpTransports(
        Settings settings, ThreadPool threads, BigArrays arrays, PageCacheRecycler pages, CircuitBreakerService breakers,
        NamedXContentRegistry contents, NetworkService network, HttpServerTransport.Dispatcher dispatcher
    ) {
        return Collections.singletonMap(
            HTTP, () -> new LoopbackHttp(settings, network, arrays, threads, contents, dispatcher)
        );
    }

    @Override
    public Map<String, AnalysisModule.AnalysisProvider<AnalyzerProvider<? extends Analyzer>>> getAnalyzers() {
        return Collections.singletonMap(
            "english",
            (index, environment, name, settings) -> new AbstractIndexAnalyzerProvider<Analyzer>(index, name, settings) {
                private final Analyzer analyzer = new EnglishAnalyzer();

                @Override
                public Analyzer get() {
                    return analyzer;
                }
            }
        );
    }
}
