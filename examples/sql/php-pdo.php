<?php
// Settles invoice 42 under a lease, with PHP's PDO.

$db = new PDO('pgsql:'); // commits each statement outside of beginTransaction()
$db->setAttribute(PDO::ATTR_ERRMODE, PDO::ERRMODE_EXCEPTION); // the default since PHP 8

// Runs one statement, and returns the first value of its result.
function value(PDO $db, string $sql, array $args = []): mixed
{
    $statement = $db->prepare($sql);
    $statement->execute($args); // sends false as '', which is no boolean: write it into the statement
    return $statement->fetchColumn();
}

$name = 'invoice:42';
$holder = gethostname() . ':' . getmypid() . ':' . bin2hex(random_bytes(16));

// true or false; with PDO::ATTR_STRINGIFY_FETCHES '1' or '0', so do not compare with ===.
$acquired = value($db, 'SELECT acquire_lock(?, ?, 60)', [$name, $holder]);
if (!$acquired) {
    echo 'busy: ', var_export($acquired, true), "\n";
    exit;
}

try {
    $total = value($db, 'SELECT invoice_total(42)'); // slow
    $db->beginTransaction();
    try {
        value($db, 'SELECT assert_lock_held(?, ?)', [$name, $holder]);
        $db->prepare('UPDATE invoices SET total = ? WHERE id = 42')->execute([$total]);
        $db->commit();
    } catch (PDOException $e) {
        $db->rollBack();
        throw $e;
    }
    echo "settled\n";
} catch (PDOException $e) {
    if ($e->getCode() !== 'LK001') {
        throw $e;
    }
    echo "lost\n";
} finally {
    value($db, 'SELECT release_lock(?, ?)', [$name, $holder]);
    value($db, 'SELECT wake_lock_waiter(?)', [$name]);
}
