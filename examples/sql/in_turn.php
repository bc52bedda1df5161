<?php
// Waits in turn for a lease, with PHP's PDO.

$db = new PDO('pgsql:'); // commits each statement outside of beginTransaction()
$name = 'invoice:42';
$holder = gethostname() . ':' . getmypid() . ':' . bin2hex(random_bytes(16));

function acquire_in_turn(PDO $db, string $name, string $holder, ?string $ticket = null): string
{
    $call = $db->prepare('SELECT acquired, fencing_token, ticket, ask_again_ms FROM acquire_in_turn(?, ?, 60, ?)');
    while (true) {
        $call->execute([$name, $holder, $ticket]);
        [$acquired, $token, $ticket, $pause] = $call->fetch(PDO::FETCH_NUM);
        if ($acquired) return $token;
        usleep(1000 * $pause);
    }
}

$token = acquire_in_turn($db, $name, $holder);
echo "acquired with token $token\n";
$db->prepare('SELECT release_lock(?, ?)')->execute([$name, $holder]);
$db->prepare('SELECT wake_lock_waiter(?)')->execute([$name]);
