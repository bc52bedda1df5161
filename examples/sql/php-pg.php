<?php
// Settles invoice 42 under a lease, with PHP's pg_* functions.

final class SQLError extends RuntimeException
{
    public function __construct(public readonly string $state, string $message)
    {
        parent::__construct($message);
    }
}

// Runs one statement, and returns the first value of its result. pg_query_params()
// returns false for every error and keeps the SQLSTATE to itself.
function value(PgSql\Connection $conn, string $sql, array $args = []): ?string
{
    if (!pg_send_query_params($conn, $sql, $args)) {
        throw new RuntimeException(pg_last_error($conn));
    }
    $result = pg_get_result($conn);
    while (pg_get_result($conn) !== false); // the end of what was sent
    $state = pg_result_error_field($result, PGSQL_DIAG_SQLSTATE);
    if ($state) {
        throw new SQLError($state, pg_result_error($result));
    }
    return pg_num_rows($result) > 0 ? pg_fetch_result($result, 0, 0) : null;
}

$name = 'invoice:42';
$holder = gethostname() . ':' . getmypid() . ':' . bin2hex(random_bytes(16));
$conn = pg_connect(''); // commits each statement outside of BEGIN and COMMIT

// 't' or 'f', and both are true in PHP.
$acquired = value($conn, 'SELECT acquire_lock($1, $2, 60)', [$name, $holder]);
if ($acquired !== 't') {
    echo 'busy: ', var_export($acquired, true), "\n";
    exit;
}

try {
    $total = value($conn, 'SELECT invoice_total(42)'); // slow
    value($conn, 'BEGIN');
    try {
        value($conn, 'SELECT assert_lock_held($1, $2)', [$name, $holder]);
        value($conn, 'UPDATE invoices SET total = $1 WHERE id = 42', [$total]);
        value($conn, 'COMMIT');
    } catch (SQLError $e) {
        value($conn, 'ROLLBACK');
        throw $e;
    }
    echo "settled\n";
} catch (SQLError $e) {
    if ($e->state !== 'LK001') {
        throw $e;
    }
    echo "lost\n";
} finally {
    value($conn, 'SELECT release_lock($1, $2)', [$name, $holder]);
    value($conn, 'SELECT wake_lock_waiter($1)', [$name]);
}
