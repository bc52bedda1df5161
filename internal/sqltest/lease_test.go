// Leases in rare conditions: waits that outlast a lease, rows and clocks that nobody expects,
// and what calls leave behind in their session.

package sqltest_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// Another session has the row locked, and leaves it as it was.
var rowLocks = []struct{ name, lock, end string }{
	{"a renewal that is rolled back", "select extend_lock('k', 'A', 600)", "rollback"},
	{"a row lock that is committed", "select from distributed_locks where lock_name = 'k' for update", "commit"},
}

// An UPDATE that waited, and finds the row unchanged, goes by the time before
// the wait: both for whether the lease is live and for its new expiry.
func TestRenewalThatWaitedPastTheExpiryIsRefused(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, row := range rowLocks {
			for _, c := range []struct{ renew, want string }{
				{"extend_lock('k', 'A', 1)", "false"},
				{"renew_lock('k', 'A', %d, '1 second')", "NULL"},
			} {
				var other, late *session
				var renewal *call
				// The lease must be live when the renewal begins: if this machine
				// was too slow for that, once more with a longer one.
				for ttl := 100 * time.Millisecond; ; ttl *= 2 {
					if ttl > patience {
						t.Fatal("no renewal came before the expiry")
					}
					other, late = d.sessions()
					token := d.number(fmt.Sprintf("(try_acquire_lock('k', 'A', '%d ms')).fencing_token", ttl.Milliseconds()))
					other.do("begin; " + row.lock)
					late.begin(level)
					renewal = late.start(strings.ReplaceAll(c.renew, "%d", fmt.Sprint(token)))
					if renewal.waitsOrEnds() {
						break
					}
					renewal.want(c.want)
					other.rollback()
					late.rollback()
					d.do("delete from distributed_locks")
				}
				await(t, d, "select expires_at < clock_timestamp() from distributed_locks")
				other.do(row.end)
				if got := renewal.outcome(); got != c.want {
					t.Errorf("%s after %s: got %s, want %s", c.renew, row.name, got, c.want)
				}
				// Its transaction is still open, and in nobody's way.
				if held := d.locks(late); held != "NULL" {
					t.Errorf("%s after %s: it keeps %s", c.renew, row.name, held)
				}
				d.want("select count(*) from (select from distributed_locks for update nowait) locked", "1")
				d.want("acquire_lock('k', 'B')", "true")
				late.rollback()
				d.do("delete from distributed_locks")
			}
		}
	})
}

func TestRenewalThatWaitedHasItsWholeTTL(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, row := range rowLocks {
			for _, renew := range []string{
				"extend_lock('k', 'A', 60)",
				"renew_lock('k', 'A', %d, '60 seconds') is not null",
			} {
				token := d.token("k", "A")
				other, late := d.sessions()
				other.do("begin; " + row.lock)
				late.begin(level)
				renewal := late.start(strings.ReplaceAll(renew, "%d", fmt.Sprint(token)))
				renewal.waitsFor(other)
				during := d.get("clock_timestamp()")
				other.do(row.end)
				renewal.want("true")
				late.commit()
				if d.get("select expires_at >= "+quote(during)+"::timestamptz + interval '60 seconds' from distributed_locks") != "true" {
					t.Errorf("%s after %s: the time it waited is missing", renew, row.name)
				}
				d.do("delete from distributed_locks")
			}
		}
	})
}

// A token that no acquisition gave out, as a hand or a faulty restore writes it.
func TestTokenAtTheEndOfTheRangeStopsItsOwnLockOnly(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	seen := &tokens{t: t}
	seen.next("nothing", d.token("other", "A"))
	d.do(fmt.Sprintf(`insert into distributed_locks (lock_name, holder_id, expires_at, fencing_token)
		values ('spoilt', 'A', clock_timestamp() - interval '1 second', %d)`, int64(math.MaxInt64)))
	for range 3 {
		for name, err := range map[string]error{
			"repair_lock_tokens": d.run("select repair_lock_tokens()"),
			"Up":                 migrations.Up(t.Context(), pgtest.Pool(t, d.url), nil),
		} {
			if code := outcome("", err); code != "22003" || !strings.Contains(err.Error(), `"spoilt"`) || !strings.Contains(err.Error(), fmt.Sprint(int64(math.MaxInt64))) {
				t.Errorf("%s does not refuse by name: %v", name, err)
			}
		}
		d.want("acquire_lock('spoilt', 'B')", "LK003")
		d.want("release_lock('other', 'A')", "true")
		seen.next("the refusal", d.token("other", "A")) // positive, too
	}
	d.want("release_lock('spoilt', 'A')", "false") // removes it
	d.want("repair_lock_tokens()", "false")
	seen.next("the removal", d.token("spoilt", "B"))
	if err := migrations.Up(t.Context(), pgtest.Pool(t, d.url), nil); err != nil {
		t.Error(err)
	}
}

// Where there is room above a token, a repair makes use of it, up to the last
// epoch; no token is ever negative.
func TestRepairLiftsTokensWhileThereIsRoom(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	seen := &tokens{t: t}
	for _, high := range []int64{1 << 62, 8388606<<40 + 7} {
		d.do(fmt.Sprintf(`delete from distributed_locks; insert into distributed_locks (lock_name, holder_id, expires_at, fencing_token)
			values ('k', 'A', clock_timestamp() - interval '1 second', %d)`, high))
		d.want("acquire_lock('k', 'B')", "LK003")
		seen.next("before the repair", d.token("l", "B"))
		d.want("repair_lock_tokens()", "true")
		d.want("repair_lock_tokens()", "false")
		seen.next("the restored row", high)
		seen.next("the repair", d.token("k", "B"))
		seen.next("the repair", d.token("m", "B"))
	}
	// No epoch is left: an overflow would make tokens negative.
	d.do("update pgxlock_epoch set epoch_base = epoch_base + 1")
	d.want("acquire_lock('n', 'B')", "LK003")
	d.do("update pgxlock_epoch set epoch_base = -timeline * 64")
	d.want("acquire_lock('n', 'B')", "LK003")
}

// PostgreSQL before 17 cannot subtract infinite times.
func TestInfiniteTimesAreReadable(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("set default_transaction_isolation = " + quote(level))
		d.do(`insert into distributed_locks (lock_name, holder_id, acquired_at, expires_at, fencing_token)
			select holder || time, holder, time::timestamptz, time::timestamptz, 1
			from unnest('{infinity,-infinity}'::text[]) time, unnest('{A,B,C}'::text[]) holder`)
		const leases = "select string_agg(distinct concat_ws(' ', expires_at, state, coalesce(remaining::text, 'no remaining'), coalesce(held_for::text, 'no held_for')), ', ') from lock_leases"
		d.want(leases, "-infinity abandoned no remaining no held_for, infinity live no remaining no held_for")

		s := d.begin(level)
		s.want("try_acquire_lock('Ainfinity', 'X')", "(f,,infinity,,A)")
		d.leavesNothing(s)
		s.rollback()
		d.want("acquire_lock('A-infinity', 'X')", "true")
		d.want("select holder_id || ' ' || isfinite(acquired_at) || ' ' || isfinite(expires_at) from distributed_locks where lock_name = 'A-infinity'", "X true true")

		d.want("acquire_lock('Ainfinity', 'A')", "true") // a renewal
		d.want("acquire_lock('Binfinity', 'A')", "false")
		d.want("extend_lock('Binfinity', 'B')", "true")
		d.want("extend_lock('B-infinity', 'B')", "false")
		d.want("select bool_and(isfinite(expires_at)) from distributed_locks where lock_name in ('Ainfinity', 'Binfinity')", "true")
		d.want("assert_lock_held('Cinfinity', 'C')", "1")
		d.want("assert_lock_held('C-infinity', 'C')", "LK001|LK002")
		d.want("assert_lock_held('C-infinity', 'C', NULL, true)", "1")
		d.want("release_lock('Cinfinity', 'C')", "true")
		d.want("release_lock('C-infinity', 'C')", "false")
		d.want("reap_expired_locks('1 hour')", "1")
		d.want(leases+" where lock_name like '%-%' and lock_name not like 'A%'", "NULL")
	})
}

// A ttl is a number of seconds: what PostgreSQL calls a day has 23 or 25 hours
// when the clocks change.
func TestTTLLastsTheSameInEveryTimeZone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, zone := range []struct{ name, spec, hours string }{
		{"no change", "'UTC'", "24"},
		// In six hours; and back, or forth, in a hundred days.
		{"clocks go forward", "format('AAA0BBB,%s/%s,%s/0', day, hour, far)", "23"},
		{"clocks go back", "format('AAA0BBB,%s/0,%s/%s', far, day, hour)", "25"},
	} {
		t.Run(zone.name, func(t *testing.T) {
			d := d.reopen(t)
			d.do("select set_config('TimeZone', (select " + zone.spec + ` from (
				select extract(doy from n) - 1 as day, extract(hour from n) as hour, extract(doy from n + interval '100 days') - 1 as far
				from (select now() at time zone 'UTC' + interval '6 hours' as n) soon) rule), false)`)
			d.want("round(extract(epoch from now() + interval '1 day' - now()) / 3600)", zone.hours) // or nothing is tested here
			for ttl, seconds := range map[string]string{
				"1 day": "86400", "24:00": "86400", "1 day -23:30": "1800", "1 day 1 hour": "90000", "-1 day 25:00": "3600",
				"1 month": "2592000", "1 month -29 days": "86400", "1 year": "31557600", "100 years": "3155760000",
				"1 microsecond": "0.000001", "250 ms": "0.25", "1.5 s": "1.5", "1 day 0.000001 s": "86400.000001",
			} {
				for _, lease := range []string{"free", "expired"} {
					d.want(fmt.Sprintf("select acquired and extract(epoch from remaining) = %s from try_acquire_lock('k', 'A', %s)", seconds, quote(ttl)), "true")
					if got := d.get("select extract(epoch from expires_at - acquired_at) = " + seconds + " from distributed_locks"); got != "true" {
						t.Errorf("%s lease of %s does not last %s s", lease, ttl, seconds)
					}
					d.expire("k")
				}
				for _, renew := range []string{
					"select expires_at from try_acquire_lock('k', 'A', %s)",
					"renew_lock('k', 'A', (select fencing_token from distributed_locks), %s)",
				} {
					d.do("update distributed_locks set expires_at = clock_timestamp() + interval '1 hour'")
					before := d.get("clock_timestamp() at time zone 'UTC'")
					expires := d.get("(" + fmt.Sprintf(renew, quote(ttl)) + ") at time zone 'UTC'")
					length := fmt.Sprintf("make_interval(secs => %s)", seconds)
					if d.get(fmt.Sprintf("%s::timestamp - %s between %s::timestamp and clock_timestamp() at time zone 'UTC'", quote(expires), length, quote(before))) != "true" {
						t.Errorf("%s, %s: renewed at %s until %s", renew, ttl, before, expires)
					}
				}
				d.do("delete from distributed_locks")
			}
		})
	}
}

// No comparison with what a row says may be NULL.
func TestLeaseHasAHolderAnExpiryAndAToken(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.do("select acquire_lock('k', 'A')")
	for _, column := range []string{"holder_id", "expires_at", "fencing_token", "acquired_at"} {
		if code := outcome("", d.run("update distributed_locks set "+column+" = NULL")); code != "23502" {
			t.Errorf("%s may be NULL: %s", column, code)
		}
	}
}

func TestCallsLeaveTheSessionsLockTimeout(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, timeout := range []string{"30s", "1d", "0", "7ms"} {
			d.do("select acquire_lock('busy', 'B'), acquire_lock('old', 'B'), acquire_lock('mine', 'A')")
			d.expire("old")
			s := d.connect()
			if timeout == "7ms" { // of this transaction only
				s.begin(level)
				s.do("set local lock_timeout = '7ms'")
			} else {
				s.do("set lock_timeout = " + quote(timeout))
				s.begin(level)
			}
			d.want("acquire_lock('late', 'B')", "true") // not in the snapshot
			d.want("extend_lock('mine', 'A')", "true")
			calls := func(where string) {
				t.Helper()
				for _, c := range []struct{ expression, want string }{
					{"acquire_lock('new', 'A')", "true"},
					{"acquire_lock('new', 'A')", "true"},
					{"acquire_lock('busy', 'A')", "false"},
					{"acquire_lock('old', 'A')", "true"},
					{"assert_lock_held('new', 'A') > 0", "true"},
					{"assert_lock_held('mine', 'A') > 0", "true"},
				} {
					s.want(c.expression, c.want)
					if got := s.get("current_setting('lock_timeout')"); got != timeout {
						t.Errorf("%s: %s made lock_timeout %s of %s", where, c.expression, got, timeout)
					}
				}
			}
			s.do("savepoint undone")
			calls("in a savepoint")
			s.do("rollback to undone")
			s.want("current_setting('lock_timeout')", timeout)
			for expression, want := range map[string]string{ // which end in errors
				"assert_lock_held('busy', 'A')": "LK001",
				"assert_lock_held('gone', 'A')": "LK001|LK002",
				"acquire_lock('late', 'A')":     "40001|false",
			} {
				s.do("savepoint failed")
				s.want(expression, want)
				s.do("rollback to failed")
				s.want("current_setting('lock_timeout')", timeout)
			}
			s.do("savepoint kept")
			calls("in a savepoint that is kept")
			s.do("release kept")
			s.want("current_setting('lock_timeout')", timeout)
			s.commit()
			if timeout == "7ms" {
				timeout = "0"
			}
			s.want("current_setting('lock_timeout')", timeout)
			d.do("delete from distributed_locks")
		}
	})
}

// The planner likes to read the whole of an empty table, and a session keeps its
// plans when the table has grown. A scan that is switched off costs so much that
// PostgreSQL compiles the query each time: nor may there be one on the epoch.
func TestSessionThatWarmedUpOnAnEmptyTableDoesNotScanIt(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("alter table distributed_locks set (autovacuum_enabled = off)") // which would throw away the plans
	d.do("alter table pgxlock_epoch set (autovacuum_enabled = off); alter table pgxlock_claims set (autovacuum_enabled = off)")
	d.do("vacuum analyze distributed_locks, pgxlock_epoch, pgxlock_claims")
	s := d.connect()
	const calls = `do $$ declare i text; v_token bigint; begin
		for i in select n from generate_series(%d, %d) n loop
			perform try_acquire_lock('row ' || i, 'B');
			perform renew_lock('row ' || i, 'A', 1), extend_lock('row ' || i, 'A'), extend_lock('row ' || i, 'B');
			perform release_lock('row ' || i, 'B'), release_lock_fenced('row ' || i, 'A', 7);
			begin perform assert_lock_held('row ' || i, 'A'); exception when sqlstate 'LK001' then null; end;
			v_token := (try_acquire_lock('new ' || i, 'B')).fencing_token;
			perform try_acquire_lock('new ' || i, 'B'), renew_lock('new ' || i, 'B', v_token), assert_lock_held('new ' || i, 'B', v_token);
			perform release_lock('new ' || i, 'B'), release_lock('row ' || i, 'A');
			perform claim_once('row ' || i), claim_once('new ' || i), claim_once('new ' || i, '1 s'), claim_once('ended ' || i, '1 s');
			perform claim_request('row ' || i, 'f'), claim_request(n, 'f'), answer_request(n, 'f', ''), claim_request(n, 'f')
				from (select pg_current_xact_id() || ' ' || i) a (n);
			perform purge_claims('1 hour', 1), purge_claims('1 second', 3);
		end loop; end $$`
	for range 12 { // a plan is made for all values after the fifth call
		s.do(fmt.Sprintf(calls, 1, 1))
	}
	d.do(`insert into distributed_locks (lock_name, holder_id, expires_at, fencing_token)
		select 'row ' || i, 'A', clock_timestamp() + interval '1 hour', 1 from generate_series(1, 20000) i`)
	d.do(`delete from pgxlock_claims; insert into pgxlock_claims select kind || ' ' || i, now() - age, now() - ended, '3' from generate_series(1, 20000) i,
		(values ('row', interval '0', NULL), ('ended', interval '2 hours', interval '1 hour'), ('old', '2 hours', NULL)) c (kind, age, ended)`)

	// What a transaction has counted so far, it sees at once.
	s.begin(readCommitted)
	const scans = "select sum(%s) from pg_stat_xact_user_tables where relid in ('distributed_locks'::regclass, 'pgxlock_epoch'::regclass, 'pgxlock_claims'::regclass)"
	sequential, byIndex := fmt.Sprintf(scans, "seq_scan"), fmt.Sprintf(scans, "idx_scan")
	before, used := s.number(sequential), s.number(byIndex)
	s.do(fmt.Sprintf(calls, 1, 200))
	if n := s.number(sequential) - before; n != 0 {
		t.Errorf("%d sequential scans", n)
	}
	if n := s.number(byIndex) - used; n < 200*(12+15) {
		t.Errorf("only %d scans by an index: they are not counted", n)
	}
	s.commit()
	d.want("select count(*) from distributed_locks", "19800")
}
