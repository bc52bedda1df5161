import java.sql.*;
import java.util.UUID;

/** Settles invoice 42 under a lease, with JDBC. */
class Jdbc {
    public static void main(String[] args) throws Exception {
        String name = "invoice:42";
        String holder = ProcessHandle.current().pid() + ":" + UUID.randomUUID();

        // A connection commits each statement until setAutoCommit(false). Pools and
        // frameworks may hand it out without autocommit.
        try (Connection conn = DriverManager.getConnection(System.getenv("JDBC_DATABASE_URL"))) {
            conn.setAutoCommit(true);

            // Strings are sent as varchar, which is no interval and no jsonb: cast them.
            boolean acquired = (boolean) value(conn,
                    "SELECT acquired FROM try_acquire_lock(?, ?, ?::interval, ?::jsonb)", name, holder, "60 seconds", "{\"by\": \"Jdbc\"}");
            if (!acquired) {
                System.out.println("busy: " + acquired);
                return;
            }
            try {
                Object total = value(conn, "SELECT invoice_total(42)"); // slow
                settle(conn, name, holder, total);
                System.out.println("settled");
            } catch (SQLException e) {
                if (!"LK001".equals(e.getSQLState())) {
                    throw e;
                }
                System.out.println("lost");
            } finally {
                value(conn, "SELECT release_lock(?, ?)", name, holder);
                value(conn, "SELECT wake_lock_waiter(?)", name);
            }
        }
    }

    static void settle(Connection conn, String name, String holder, Object total) throws SQLException {
        conn.setAutoCommit(false);
        try {
            value(conn, "SELECT assert_lock_held(?, ?)", name, holder);
            try (PreparedStatement update = conn.prepareStatement("UPDATE invoices SET total = ? WHERE id = 42")) {
                update.setObject(1, total);
                update.executeUpdate();
            }
            conn.commit();
        } catch (SQLException e) {
            conn.rollback();
            throw e;
        } finally {
            conn.setAutoCommit(true);
        }
    }

    /** Runs one statement, and returns the first value of its result. */
    static Object value(Connection conn, String sql, Object... args) throws SQLException {
        try (PreparedStatement statement = conn.prepareStatement(sql)) {
            for (int i = 0; i < args.length; i++) {
                statement.setObject(i + 1, args[i]);
            }
            try (ResultSet row = statement.executeQuery()) {
                row.next();
                return row.getObject(1); // getBoolean makes false of NULL
            }
        }
    }
}
