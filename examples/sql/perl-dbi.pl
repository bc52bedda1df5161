# Settles invoice 42 under a lease, with Perl's DBD::Pg.
use strict;
use warnings;
use DBI;
use Sys::Hostname;

# RaiseError: else a failed call returns nothing, as if somebody else had the lease.
# AutoCommit: each statement outside of begin_work is committed.
my $db = DBI->connect('dbi:Pg:', '', '', { RaiseError => 1, PrintError => 0, AutoCommit => 1 });
sub value { my ($sql, @args) = @_; return ($db->selectrow_array($sql, undef, @args))[0] }

my $name   = 'invoice:42';
my $holder = join ':', hostname(), $$, value('SELECT gen_random_uuid()');

# 1 or 0; with pg_bool_tf 't' or 'f', and both are true in Perl.
my $acquired = value('SELECT acquire_lock(?, ?, 60)', $name, $holder);
if (!$acquired) {
    print "busy: $acquired\n";
    exit;
}

my $state = '';
my $settled = eval {
    my $total = value('SELECT invoice_total(42)');    # slow
    $db->begin_work;
    value('SELECT assert_lock_held(?, ?)', $name, $holder);
    $db->do('UPDATE invoices SET total = ? WHERE id = 42', undef, $total);
    $db->commit;
    1;
};
my $error = $@;
if (!$settled) {
    $state = $db->state;
    $db->rollback unless $db->{AutoCommit};
}
value('SELECT release_lock(?, ?)', $name, $holder);
value('SELECT wake_lock_waiter(?)', $name);

die $error unless $settled || $state eq 'LK001';
print $settled ? "settled\n" : "lost\n";
