package sqltest_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// What was acknowledged is there after a crash, even if the role does not wait
// for its commits otherwise, and what was given out does not come again.
func TestAcknowledgedGrantsSurviveACrash(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, d := private(t, nil)
	seen := &tokens{t: t}
	d.do("alter role postgres set synchronous_commit = off")
	d.do("select acquire_lock('released', 'A', 3600), acquire_lock('taken', 'A'), acquire_lock('renewed', 'A', 1)")
	d.expire("taken")

	d = open(t, d.url) // now as the role is set
	d.want("current_setting('synchronous_commit')", "off")
	restart := func() { d = crash(t, server) }

	seen.next("nothing", d.token("k", "A"))
	restart()
	d.want("select holder_id from distributed_locks where lock_name = 'k'", "A")

	seen.next("a crash", d.token("taken", "B"))
	restart()
	d.want("select holder_id from distributed_locks where lock_name = 'taken'", "B")

	d.want("extend_lock('k', 'A', 10000)", "true")
	restart()
	d.want("select expires_at > clock_timestamp() + interval '9000 s' from distributed_locks where lock_name = 'k'", "true")

	d.want("release_lock('released', 'A')", "true")
	restart()
	d.want("select count(*) from distributed_locks where lock_name = 'released'", "0")

	// Tokens that were drawn and not committed are not given out again either,
	// once something later was acknowledged.
	open := d.begin(readCommitted)
	seen.next("a crash", open.token("open", "A"))
	seen.next("an open draw", d.token("last", "A"))
	restart()
	d.want("select count(*) from distributed_locks where lock_name = 'open'", "0")
	seen.next("a crash", d.token("open", "B"))

	d.want("current_setting('synchronous_commit')", "off")
	d.do("begin; select acquire_lock('l', 'A')")
	d.want("current_setting('synchronous_commit')", "on")
	d.commit()
	d.want("current_setting('synchronous_commit')", "off") // raised for that transaction only
}

// connectAsync opens a session whose acquires and releases do not wait for the disk.
func (d *database) connectAsync() *session {
	d.t.Helper()
	s := d.connect()
	s.do("set synchronous_commit = off; set pgxlock.durability = async")
	return s
}

// The log writer of the server sleeps, so that a crash takes back what was committed
// without waiting, with the numbers that were drawn for it.
func TestTokensOfCommitsThatACrashTakesBackAreNotRepeated(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, d := private(t, nil)
	seen := &tokens{t: t}
	lost := 0
	for round := range 4 {
		s := d.connectAsync()
		for i := range 3 {
			seen.next("a crash", s.token(fmt.Sprint(round, i), "A"))
		}
		seen.next("another", s.token("k", "A"))
		s.want("release_lock('k', 'A')", "true")
		d = crash(t, server)
		if d.get(fmt.Sprintf("exists (select from distributed_locks where lock_name = '%d 2')", round)) == "false" {
			lost++
		}
		if round%2 == 0 {
			d.want("repair_lock_tokens()", "false")
		}
	}
	if lost == 0 {
		t.Error("no crash took anything back: nothing was tested")
	}
	seen.next("the last crash", d.token("k", "B"))
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	d = open(t, d.url)
	const base = "(select epoch_base from pgxlock_epoch)"
	before := d.get(base)
	seen.next("a clean restart", d.token("l", "B"))
	d.want(base, before) // begins no epoch
}

// Numbers begin again in the epoch that a repair begins.
func TestCrashTakesBackNoRepairOfTokens(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, d := private(t, nil)
	seen := &tokens{t: t}
	d.do("update pgxlock_epoch set system_identifier = system_identifier + 1")
	s := d.connectAsync()
	s.want("repair_lock_tokens()", "true")
	seen.next("a repair", s.token("k", "A"))
	d = crash(t, server)
	d.want("repair_lock_tokens()", "false")
	seen.next("a crash", d.token("l", "B"))
}

// Sessions of both kinds acquire the same leases, and the server crashes in between.
func TestSoakDurableGrantsAndTokensSurviveWhateverACrashTakesBack(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, d := private(t, nil)
	dice := rand.New(rand.NewPCG(rand.Uint64(), 1))
	async := d.connectAsync()
	type lease struct {
		holder  string
		token   int64
		durable bool // a crash does not take it back
		ended   bool // by a release that a crash may take back
	}
	seen, leases := &tokens{t: t}, map[string]*lease{}
	var trace []string
	flushed := func() { // a commit on disk: so are all before it
		for name, l := range leases {
			if l.durable = true; l.ended {
				delete(leases, name)
			}
		}
	}
	lost := 0
	for round := range pgtest.Soak(t, 60, 6000) {
		name, s, how := string(rune('a'+dice.IntN(4))), d.session, "durable"
		if dice.IntN(3) > 0 {
			s, how = async, "async"
		}
		l := leases[name]
		op := dice.IntN(16)
		trace = append(trace, fmt.Sprintf("%d %s %s", op, name, how))
		switch {
		case op < 7 && (l == nil || l.ended || op < 2):
			if l != nil && !l.ended {
				s.do("update distributed_locks set expires_at = clock_timestamp() - interval '1 second' where lock_name = " + quote(name))
			}
			holder := fmt.Sprint("holder ", round)
			token := s.number(fmt.Sprintf("coalesce((select tokens[1] from pgxlock_acquire_batch(%s, '{%s}', '{3600000}', '{null}', '{0}')), 0)", "'{"+name+"}'", holder))
			seen.next(fmt.Sprint(trace), token)
			leases[name] = &lease{holder: holder, token: token}
			if how == "durable" {
				flushed()
			}
		case op < 10 && l != nil && !l.ended:
			if got := s.get(fmt.Sprintf("renew_lock('%s', '%s', %d, '1 h') is not null", name, l.holder, l.token)); got == "true" {
				flushed()
			} else if l.durable {
				t.Fatalf("%s cannot be renewed: %s", name, trace)
			}
		case op < 13 && l != nil && !l.ended:
			s.want(fmt.Sprintf("lower(pgxlock_release_batch('{%s}', '{%s}', '{%d}'))", name, l.holder, l.token), "r")
			l.ended = true
			if how == "durable" {
				flushed()
			}
		case op == 13:
			if dice.IntN(2) == 0 {
				d.do(useUpHalf)
			}
			if d.get("repair_lock_tokens()") == "true" {
				flushed()
			}
		case op == 14 && dice.IntN(2) == 0:
			if err := server.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			d = open(t, d.url)
			async = d.connectAsync()
			flushed()
		case op == 15:
			d = crash(t, server)
			async = d.connectAsync()
			for name, l := range leases {
				if there := d.get(fmt.Sprintf("exists (select from distributed_locks where lock_name = '%s' and holder_id = '%s' and fencing_token = %d)", name, l.holder, l.token)); there == "true" && !l.ended {
					continue
				}
				if l.durable && !l.ended {
					t.Fatalf("%s, which is durable, is gone: %s", name, trace)
				}
				lost++
				delete(leases, name)
				d.do("delete from distributed_locks where lock_name = " + quote(name)) // of whom a crash gave it back
			}
			flushed()
		}
	}
	t.Log(lost, "leases lost in crashes")
}

// The first token after a crash raises the epoch. While its transaction is open, others
// neither wait for it nor draw tokens that the next crash takes back.
func TestTokensDrawnBesideTheFirstAfterACrashAreDurable(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, d := private(t, nil)
	seen := &tokens{t: t}
	for _, level := range levels {
		d.do("delete from distributed_locks")
		d = crash(t, server)
		first := d.begin(level)
		first.do("select acquire_lock('first', 'A')")
		seen.next("a crash", d.connectAsync().token("second", "A"))
		d = crash(t, server)
		d.want("exists (select from distributed_locks where lock_name = 'first')", "false")
		d.want("exists (select from distributed_locks where lock_name = 'second')", "true")

		first = d.begin(level)
		seen.next("a crash", first.token("first", "A"))
		seen.next("the first", d.connectAsync().token("third", "A"))
		first.rollback()
		seen.next("its rollback", d.connectAsync().token("fourth", "A"))
		d.want("(select count(*) from pgxlock_since_crash)", "1")
		seen.next("the raise", d.connectAsync().token("fifth", "A"))
		d = crash(t, server)
		if level == readCommitted { // above it the first one does not raise the epoch, so the third one has
			d.want("exists (select from distributed_locks where lock_name = 'fourth')", "true")
		}
		d.want("exists (select from distributed_locks where lock_name = 'fifth')", "false")
		d.want("repair_lock_tokens()", "false")
		seen.next("a crash", d.token("fifth", "A"))
	}
}

// Only acquires and releases can do without the disk.
func TestRenewalsAndClaimsAreDurableWhateverALockerAsksFor(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	s := d.connectAsync()
	token := s.token("k", "A")
	s.do("select acquire_shared_lock('shared', 'A')")
	for call, want := range map[string]string{
		"acquire_lock('new', 'A')":                                   "off",
		"acquire_shared_lock('new', 'A')":                            "off",
		"acquire_permit('new', 'A', 2)":                              "off",
		"release_lock('k', 'A')":                                     "off",
		"release_shared_lock('shared', 'A')":                         "off",
		"extend_lock('k', 'A')":                                      "on",
		"extend_shared_lock('shared', 'A')":                          "on",
		"start_run('k', '1 day')":                                    "on",
		fmt.Sprintf("renew_lock('k', 'A', %d)", token):               "on",
		"pgxlock_renew_batch('{k}', '{A}', '{1}', '{60000}')":        "on",
		"pgxlock_renew_shares_batch('{k}', '{A}', '{1}', '{60000}')": "on",
		fmt.Sprintf("pgxlock_change_lease('k', 'A', %d, false, (select xmin::text from distributed_locks where lock_name = 'k'), 60000, null)", token): "on",
		"pgxlock_advisory_batch('{0}', '{1}', 1)": "on",
	} {
		s.do("begin; select " + call)
		if got := s.get("current_setting('synchronous_commit')"); got != want {
			t.Errorf("%s: synchronous_commit is %s, want %s", call, got, want)
		}
		s.rollback()
	}
}

// A stronger setting is nothing to change, and neither is that of a transaction
// that writes nothing.
func TestSynchronousCommitIsOnlyRaisedAndOnlyByWriters(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_lock('k', 'A')")
	for setting, want := range map[string]string{"off": "on", "local": "on", "on": "on", "remote_apply": "remote_apply", "remote_write": "remote_write"} {
		d.do("set synchronous_commit = " + setting)
		for _, call := range []string{
			"acquire_lock('k', 'A')", "extend_lock('k', 'A')", "acquire_lock('new', 'A')", "release_lock('k', 'A')",
			"tokens[1] is not null from pgxlock_acquire_batch('{new}', '{A}', '{60000}', '{null}', '{0}')",
			"token is not null from pgxlock_acquire_one('new', 'A', 60000, null, 0)",
		} {
			d.do("begin; select " + call)
			d.want("current_setting('synchronous_commit')", want)
			d.rollback()
		}
		d.do("begin; select acquire_lock('k', 'B')")
		d.want("current_setting('synchronous_commit')", setting)
		d.rollback()
	}
}

// The standby has not received the last acquires when it becomes the primary;
// and once more.
func TestTokensGrowOverFailoversThatLoseCommits(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	primary, d := private(t, map[string]string{"fsync": "off"})
	seen := &tokens{t: t}
	for failover := range 2 {
		standby := pgtest.Standby(t, primary, pgserver.Config{})
		d.do("delete from distributed_locks")
		d.do("select start_run('started', '36500 days')")
		seen.next("a failover", d.token("k", "A"))
		s := open(t, standby.URL("postgres"))
		await(t, s, fmt.Sprintf("exists (select from distributed_locks where fencing_token = %d)", seen.highest))
		refusesToWrite(t, s)

		// From here on the standby gets nothing more.
		if err := standby.Detach(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 100 {
			d.want("release_lock('k', 'A')", "true")
			seen.next("a release", d.token("k", "A"))
		}
		if err := primary.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := standby.Promote(t.Context()); err != nil {
			t.Fatal(err)
		}
		primary, d = standby, open(t, standby.URL("postgres"))
		d.want("pgxlock_timeline()", fmt.Sprint(2+failover))
		d.want("select count(*) from distributed_locks", "1")
		d.expire("k")
		seen.next("a failover", d.token("k", "B"))
		seen.next("a failover", d.token("l", "B"))
		d.want("repair_lock_tokens()", "false")
	}
}

// Each crash begins an epoch of tokens. The standby knows of none of those, and there were
// more of them than promotions.
func TestTokensGrowOverAFailoverThatLosesCrashes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	primary, d := private(t, map[string]string{"fsync": "off"})
	seen := &tokens{t: t}
	seen.next("nothing", d.token("k", "A"))
	standby := pgtest.Standby(t, primary, pgserver.Config{})
	s := open(t, standby.URL("postgres"))
	await(t, s, fmt.Sprintf("exists (select from distributed_locks where fencing_token = %d)", seen.highest))
	if err := standby.Detach(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		d = crash(t, primary)
		d.want("release_lock('k', 'A')", "true")
		seen.next("a crash", d.token("k", "A"))
	}
	for range 50 { // more than the sequence skips at a crash
		d.want("release_lock('k', 'A')", "true")
		seen.next("a release", d.token("k", "A"))
	}
	if err := primary.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := standby.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	d = open(t, standby.URL("postgres"))
	d.expire("k")
	seen.next("a failover", d.token("k", "B"))
}

// refusesToWrite checks a standby on which A's lease k is to be seen.
func refusesToWrite(t *testing.T, d *database) {
	t.Helper()
	for _, call := range []string{
		"acquire_lock('free', 'B')", "acquire_lock('k', 'A')", "acquire_lock('k', 'B')", "(try_acquire_lock('free', 'B')).acquired",
		"extend_lock('k', 'A')", "release_lock('k', 'A')", "release_all_locks('A')", "assert_lock_held('k', 'A')",
		"lock_tx('k')", "lock_tx('k', '0')", "lock_tx('k', '1 s', true)", "lock_tx('k', p_allow_stale_snapshot => true)",
		"claim_once('k')", "claim_once('k', '1 s')", "(claim_request('k', 'f')).outcome", "purge_claims('0')",
		"pgxlock_advisory_batch('{0}', '{1}', 1)", "pgxlock_advisory_batch('{}', '{}', 1)", "assert_advisory_lock_held(1, 1, 1, 1)",
		"start_run('k', '1 day')", "start_run('started', '36500 days')", "start_run_at('k', now())", "finish_run('k', now())", "forget_run('k', now())",
		"(select count(*) from pgxlock_due_runs('k', '1 h', '0', 'UTC', 0, false))",
		"acquire_permit('free', 'B', 1)", "(acquire_permits_in_turn('free', 'B', 1)).acquired", "(acquire_shared_in_turn('free', 'B')).acquired", "(select count(*) from pgxlock_permit_batch('{}', '{}', '{}', '{}', '{}', '{}'))", "ask_to_step_down('k')", "allow_rate('k', 1, 1)",
	} {
		d.want(call, "25006")
		if held := d.locks(d.session); held != "NULL" {
			t.Errorf("%s keeps %s", call, held)
		}
	}
	d.want("select state from lock_leases", "live")
}

// The first acquire after a failover remembers the timeline. Its transaction is
// prepared, and stays so over a restart.
func TestPreparedFirstAcquireIsInNobodysWay(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, d := private(t, map[string]string{"max_prepared_transactions": "2"})
	seen := &tokens{t: t}
	d.do("update pgxlock_epoch set timeline = timeline - 1")
	first := d.begin(readCommitted)
	seen.next("nothing", first.token("k", "A"))
	first.do("prepare transaction 'first'")
	for _, level := range levels {
		s := d.begin(level)
		seen.next("a prepared acquire", s.token("of "+level, "B"))
		s.commit()
		s.done()
	}
	d.want("acquire_lock('k', 'B')", "false")
	d = crash(t, server)
	seen.next("a crash", d.token("after the crash", "B"))
	d.want("acquire_lock('k', 'B')", "false")
	d.do("rollback prepared 'first'")
	seen.next("a rollback", d.token("k", "B"))
	d.want("select timeline = pgxlock_timeline() from pgxlock_epoch", "true")
}

// A try of a lock that is held writes no log. Reading may: it prunes old rows.
// So the page is clean, and nothing else runs on the server.
func TestFailedTryWritesNoLog(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	_, d := private(t, map[string]string{"fsync": "off", "wal_level": "minimal", "max_wal_senders": "0"})
	d.do("select acquire_lock('held', 'A'), acquire_lock('fenced', 'A')")
	d.expire("fenced")
	writer := d.begin(readCommitted)
	writer.do("select assert_lock_held('fenced', 'A', NULL, true)")
	d.do("vacuum distributed_locks")
	d.want("acquire_lock('held', 'B')", "false") // fills the caches
	d.do("checkpoint")

	before := d.get("pg_current_wal_insert_lsn()")
	for range 50 {
		d.want("acquire_lock('held', 'B')", "false")
		d.want("acquire_lock('fenced', 'B')", "false")
	}
	if after := d.get("pg_current_wal_insert_lsn()"); after != before {
		t.Errorf("the log went from %s to %s", before, after)
	}
}
