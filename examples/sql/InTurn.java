import java.sql.*;
import java.util.UUID;

/** Waits in turn for a lease, with JDBC. */
class InTurn {
    static final String CALL = "SELECT acquired, fencing_token, ticket, ask_again_ms FROM acquire_in_turn(?, ?, 60, ?)";

    static ResultSet call(PreparedStatement statement, Object... args) throws SQLException {
        for (int i = 0; i < args.length; i++) {
            statement.setObject(i + 1, args[i]);
        }
        ResultSet rows = statement.executeQuery();
        rows.next();
        return rows;
    }

    static long acquireInTurn(Connection conn, String name, String holder) throws Exception {
        try (PreparedStatement statement = conn.prepareStatement(CALL)) {
            ResultSet row = call(statement, name, holder, null);
            for (; !row.getBoolean("acquired"); row = call(statement, name, holder, row.getLong("ticket"))) {
                Thread.sleep(row.getInt("ask_again_ms"));
            }
            return row.getLong("fencing_token");
        }
    }

    public static void main(String[] args) throws Exception {
        String name = "invoice:42";
        String holder = ProcessHandle.current().pid() + ":" + UUID.randomUUID();
        try (Connection conn = DriverManager.getConnection(System.getenv("JDBC_DATABASE_URL"))) {
            conn.setAutoCommit(true); // a ticket counts once it is committed
            System.out.println("acquired with token " + acquireInTurn(conn, name, holder));
            try (PreparedStatement release = conn.prepareStatement("SELECT release_lock(?, ?)");
                    PreparedStatement wake = conn.prepareStatement("SELECT wake_lock_waiter(?)")) {
                call(release, name, holder);
                call(wake, name);
            }
        }
    }
}
