import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Collections;
import org.elasticsearch.common.settings.Settings;
import org.elasticsearch.env.Environment;
import org.elasticsearch.node.InternalSettingsPreparer;
import org.elasticsearch.node.Node;

/**
 * Runs the Elasticsearch server in this process until standard input closes.
 *
 * Arguments: folder of the node, port (0 for any free one), then `setting=value` pairs. Prints `READY <port>` once it
 * answers. The parent holds the other end of standard input, so the node ends with it, however it ends.
 */
public final class EmbeddedNode {
    private static final long PATIENCE_OF_SHUTDOWN_MS = 5_000;

    private static final class PluginNode extends Node {
        PluginNode(Environment environment) {
            super(environment, Collections.singletonList(BridgePlugin.class), false);
        }
    }

    public static void main(String[] arguments) throws Exception {
        Path home = Path.of(arguments[0]);
        Files.createDirectories(home.resolve("config"));
        Settings.Builder settings = Settings.builder()
            .put("path.home", home.toString())
            .put("cluster.name", "grounded-rl-tests")
            .put("node.name", "test-node")
            .put("discovery.type", "single-node")
            .put("transport.type", BridgePlugin.TRANSPORT)
            .put("http.type", BridgePlugin.HTTP)
            .put("http.host", "127.0.0.1")
            .put("http.port", arguments[1])
            .put("cluster.routing.allocation.disk.threshold_enabled", "false");
        for (int i = 2; i < arguments.length; i++) {
            String[] pair = arguments[i].split("=", 2);
            settings.put(pair[0], pair[1]);
        }
        Node node = new PluginNode(
            InternalSettingsPreparer.prepareEnvironment(settings.build(), Collections.emptyMap(), null, () -> "test-node")
        );
        node.start();
        System.out.println("READY " + LoopbackHttp.boundPort());
        System.out.flush();

        while (System.in.read() >= 0) {
            continue;
        }
        Thread deadline = new Thread(() -> {
            try {
                Thread.sleep(PATIENCE_OF_SHUTDOWN_MS);
            } catch (InterruptedException interrupted) {
                Thread.currentThread().interrupt();
            }
            Runtime.getRuntime().halt(1);
        });
        deadline.setDaemon(true);
        deadline.start();
        node.close();
        Runtime.getRuntime().halt(0);
    }
}
