// Shared leases: a group in distributed_locks, and its shares.

package sqltest_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// expireShare lets one share run out, and expireGroup all of them.
func (d *database) expireShare(lock, holder string) {
	d.t.Helper()
	d.do(fmt.Sprintf("update distributed_lock_shares set expires_at = clock_timestamp() - interval '1 second' where lock_name = %s and holder_id = %s", quote(lock), quote(holder)))
}

func (d *database) expireGroup(lock string) {
	d.t.Helper()
	d.do("update distributed_lock_shares set expires_at = clock_timestamp() - interval '1 second' where lock_name = " + quote(lock))
	d.expire(lock)
}

// wantShares wants these to share the lock now, in order; none: nobody.
func (d *database) wantShares(lock string, holders ...string) {
	d.t.Helper()
	want := strings.Join(holders, ",")
	if want == "" {
		want = "NULL"
	}
	d.want("select string_agg(holder_id, ',' order by holder_id) from lock_shares where state = 'live' and lock_name = "+quote(lock), want)
}

// noShareOutlastsItsGroup is what all depends on.
const noShareOutlastsItsGroup = `select count(*) from distributed_lock_shares s left join distributed_locks l on l.lock_name = s.lock_name and l.holder_id = '*shared' and l.fencing_token = s.fencing_token
	where s.expires_at > clock_timestamp() and (l.expires_at is null or l.expires_at < s.expires_at)`

func TestSharedLeaseExcludesExclusiveCallers(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		s := d.connect()
		s.do("set default_transaction_isolation = " + quote(level))
		s.want("acquire_shared_lock('k', 'A')", "true")
		s.want("acquire_shared_lock('k', 'B', 60, '{\"n\": 1}')", "true")
		s.want("acquire_shared_lock('k', 'A')", "true") // the same holder
		d.wantShares("k", "A", "B")
		for _, holder := range []string{"A", "C"} { // no share becomes more
			s.want("acquire_lock('k', '"+holder+"')", "false")
		}
		s.want("(try_acquire_lock('k', 'C')).held_by", "*shared")
		s.want("extend_shared_lock('k', 'C')", "false")
		s.want("release_shared_lock('k', 'C')", "false")
		s.want("extend_shared_lock('k', 'B', 100)", "true")
		s.want("release_shared_lock('k', 'A')", "true")
		s.want("release_shared_lock('k', 'A')", "false")
		s.want("acquire_lock('k', 'C')", "false")
		s.want("release_shared_lock('k', 'B')", "true")
		d.want("(select count(*) from distributed_locks) + (select count(*) from distributed_lock_shares)", "0")

		s.want("acquire_lock('k', 'C')", "true")
		for _, holder := range []string{"A", "C"} {
			s.want("acquire_shared_lock('k', '"+holder+"')", "false")
		}
		s.want("select acquired = false and fencing_token is null and held_by = 'C' and remaining between interval '1 s' and interval '1 hour' from try_acquire_shared_lock('k', 'A')", "true")
		s.want("extend_shared_lock('k', 'C')", "false")
		s.want("release_shared_lock('k', 'C')", "false")
		s.want("release_lock('k', 'C')", "true")
	})
}

// All that was there before the shares: it neither grants, nor changes, nor removes
// what is shared.
func TestOlderFunctionsLeaveALiveGroupAlone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_shared_lock('k', 'A', 600), acquire_shared_lock('k', 'B', 60)")
	const group = "select concat_ws(' ', l.*) || string_agg(concat_ws(' ', s.*), ',' order by s.holder_id) from distributed_locks l join distributed_lock_shares s using (lock_name) group by l.lock_name"
	before, token := d.get(group), d.get("select fencing_token from distributed_locks")
	for call, want := range map[string]string{
		"acquire_lock('k', 'A')":                                                               "false",
		"(try_acquire_lock('k', 'C')).acquired":                                                "false",
		"acquire_lock('k', '*shared')":                                                         "22023",
		"extend_lock('k', 'A')":                                                                "false",
		"extend_lock('k', '*shared')":                                                          "22023",
		"renew_lock('k', '*shared', " + token + ")":                                            "22023",
		"renew_lock('k', 'A', " + token + ") is null":                                          "true",
		"release_lock('k', 'A')":                                                               "false",
		"release_lock('k', '*shared')":                                                         "22023",
		"release_lock_fenced('k', 'A', " + token + ")":                                         "false",
		"release_all_locks('*shared')":                                                         "22023",
		"assert_lock_held('k', 'A')":                                                           "LK001",
		"assert_lock_held('k', '*shared')":                                                     "22023",
		"reap_expired_locks('0 s')":                                                            "0",
		"pgxlock_reap_shares('0 s')":                                                           "0",
		batch(batches[0], "C", "k", "new"):                                                     "f *shared,t C",
		batch(batches[1], "C", "k", "new"):                                                     "f *shared,t C",
		batch(batches[0], "*shared", "k"):                                                      "22023",
		batch(batches[1], "*shared", "new"):                                                    "22023",
		"pgxlock_renew_batch('{k}', '{*shared}', '{" + token + "}', '{1}')":                    "skipped",
		"pgxlock_release_batch('{k}', '{*shared}', '{" + token + "}')":                         "g",
		"pgxlock_release_batch('{k}', '{A}', '{" + token + "}')":                               "g",
		"(select holder_id from distributed_locks where lock_name = 'k')":                      "*shared",
		"(select held_by[1] from pgxlock_acquire_batch('{k}', '{C}', '{1}', '{null}', '{0}'))": "*shared",
	} {
		s := d.begin(readCommitted)
		s.want(call, want)
		s.rollback()
		if after := d.get(group); after != before {
			t.Fatalf("%s: %s, was %s", call, after, before)
		}
	}
}

// The group's token is between those of who has the lock alone.
func TestAllOfAGroupHaveOneTokenAndTheNextAGreaterOne(t *testing.T) {
	t.Parallel()
	d := install(t)
	last := d.token("k", "W")
	share := func(holder string) int64 {
		t.Helper()
		return d.number("(try_acquire_shared_lock('k', '" + holder + "')).fencing_token")
	}
	for _, end := range []string{"released", "expired", "reaped", "by hand"} {
		d.do("select release_lock('k', 'W')")
		token := share("A")
		if token <= last {
			t.Errorf("the group has token %d after %d", token, last)
		}
		if second, again := share("B"), share("A"); second != token || again != token {
			t.Errorf("tokens %d, %d and %d in one group", token, second, again)
		}
		switch end {
		case "released":
			d.do("select release_shared_lock('k', 'A'), release_shared_lock('k', 'B')")
		case "expired":
			d.expireGroup("k")
		case "reaped":
			d.expireGroup("k")
			d.want("reap_expired_locks('0 s')", "1")
		case "by hand":
			d.do("delete from distributed_locks")
		}
		if last = d.token("k", "W"); last <= token {
			t.Errorf("%s: the next one has token %d after %d", end, last, token)
		}
	}
}

// A share of a group that is over counts for nothing, not even when there is a new one.
func TestSharePassesIntoNoOtherGroup(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_shared_lock('k', 'A', 600)")
	for _, end := range []string{"delete from distributed_locks", "update distributed_locks set expires_at = clock_timestamp()"} {
		d.do(end)
		d.do("select acquire_lock('k', 'W')")
		d.wantShares("k")
		d.want("extend_shared_lock('k', 'A')", "false")
		d.want("release_shared_lock('k', 'A')", "false")
		d.want("assert_shared_lock_held('k', 'A', null, true)", "LK001")
		d.do("select release_lock('k', 'W'), acquire_shared_lock('k', 'B')")
		d.wantShares("k", "B")
		d.want("select count(*) from distributed_lock_shares", "1") // the new group begins without what was left
		d.want("extend_shared_lock('k', 'A')", "false")
		d.want("assert_shared_lock_held('k', 'A', null, true)", "LK001")
		d.do("select release_shared_lock('k', 'B'), acquire_shared_lock('k', 'A')")
	}
}

// However long a caller that left wanted it, and even if a holder no longer renews: a writer
// waits for the last of those who are there, and not longer.
func TestWriterWaitsForTheLastOfThoseWhoAreThere(t *testing.T) {
	t.Parallel()
	d := install(t)
	const until = "select round(extract(epoch from expires_at - clock_timestamp()) / 20) * 20 from distributed_locks"
	d.do("select acquire_shared_lock('k', 'A', 5000), acquire_shared_lock('k', 'B', 100), acquire_shared_lock('k', 'C', 200)")
	d.want(until, "5000")
	d.do("select release_shared_lock('k', 'A')")
	d.want(until, "200")
	d.want("extend_shared_lock('k', 'B', 300)", "true")
	d.want(until, "300")
	d.do("select acquire_shared_lock('k', 'C', 20)") // for less time than the others
	d.want(until, "300")
	d.expireShare("k", "C")
	d.do("select release_shared_lock('k', 'B')") // C has crashed
	d.want("acquire_lock('k', 'W')", "true")
}

// openShares is what another transaction has done, and not committed, while somebody
// tries to share the lock.
var openShares = []struct{ name, before, work, want string }{
	{"the first share", "", "acquire_shared_lock('k', 'A')", "NULL"},
	{"another share", "acquire_shared_lock('k', 'X')", "acquire_shared_lock('k', 'A')", "NULL"},
	{"a renewal", "acquire_shared_lock('k', 'A')", "extend_shared_lock('k', 'A')", "NULL"},
	{"a release of one", "acquire_shared_lock('k', 'A') and acquire_shared_lock('k', 'X')", "release_shared_lock('k', 'A')", "NULL"},
	{"a release of the last", "acquire_shared_lock('k', 'A')", "release_shared_lock('k', 'A')", "NULL"},
	{"a fence", "acquire_shared_lock('k', 'A')", "assert_shared_lock_held('k', 'A')", "true"},
	{"an acquire", "", "acquire_lock('k', 'A')", "NULL"},
	{"a release", "acquire_lock('k', 'A')", "release_lock('k', 'A')", "false"},
	{"a take-over", "expired", "acquire_lock('k', 'A')", "NULL"},
	{"a share of what expired", "expired", "acquire_shared_lock('k', 'A')", "NULL"},
	{"a fence after the expiry", "expired", "assert_shared_lock_held('k', 'X', null, true)", "NULL"},
	{"a reaping", "expired", "reap_expired_locks('0 s')", "NULL"},
	{"a reaping of shares", "expired", "pgxlock_reap_shares('0 s')", "NULL"},
	{"a row lock by hand", "acquire_shared_lock('k', 'A')", "from distributed_locks for update", "NULL"},
	{"a row lock on an expired one", "expired", "from distributed_locks for update", "NULL"},
	{"a release of an expired one", "expired", "release_shared_lock('k', 'X')", "NULL"},
}

// As for exclusive ones: a try has the answer while the other transaction is
// open, and if it is not granted nothing is kept.
func TestTryToShareNeverWaitsForUncommittedWork(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	holder, contender := d.sessions()
	for _, level := range levels {
		for _, w := range openShares {
			for snapshot := range 3 {
				takeSnapshot := func(now int) {
					if now == snapshot {
						contender.begin(level)
					}
				}
				takeSnapshot(0)
				switch w.before {
				case "":
				case "expired":
					d.do("select acquire_shared_lock('k', 'X')")
					d.expireGroup("k")
				default:
					d.do("select " + w.before)
				}
				takeSnapshot(1)
				holder.begin(readCommitted)
				holder.do("select " + w.work)
				takeSnapshot(2)

				got := contender.outcome("acquire_shared_lock('k', 'B')")
				if got != w.want && (got != "40001" && got != "NULL" || level == readCommitted) {
					t.Errorf("%s, %s, snapshot %d: got %s, want %s", level, w.name, snapshot, got, w.want)
				} else if got == "NULL" || got == "false" {
					d.leavesNothing(contender)
				}
				if t.Failed() {
					t.Fatalf("%s, %s, snapshot %d", level, w.name, snapshot)
				}
				contender.rollback()
				holder.rollback()
				d.do("delete from distributed_locks; delete from distributed_lock_shares")
			}
		}
	}
}

// B reads a live group, and is about to lock its row. Meanwhile the group runs out,
// and somebody else takes the lock, or nobody does; or its last share is given back.
func TestShareGoesByWhatIsThereOnceTheGroupIsLocked(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for meanwhile, want := range map[string]string{
		"update distributed_lock_shares set expires_at = clock_timestamp(); update distributed_locks set expires_at = clock_timestamp()":                                "t B",
		"update distributed_lock_shares set expires_at = clock_timestamp(); update distributed_locks set expires_at = clock_timestamp(); select acquire_lock('k', 'W')": "f W",
		"select release_shared_lock('k', 'A')":                                "t B",
		"select release_shared_lock('k', 'A'), acquire_lock('k', 'W')":        "f W",
		"select release_shared_lock('k', 'A'), acquire_shared_lock('k', 'C')": "t B",
	} {
		d.do("select acquire_shared_lock('k', 'A')")
		token := d.number("select fencing_token from distributed_locks")
		other, contender := d.sessions()
		// This lets others read the table and keeps them from locking rows.
		other.do("begin; lock table distributed_locks in exclusive mode")
		contender.begin(readCommitted)
		const call = "select concat_ws(' ', acquired, held_by) from try_acquire_shared_lock('k', 'B')"
		try := contender.start(call)
		try.waitsFor(other)
		other.do(meanwhile + "; commit")
		got := try.outcome()
		if got == "f" { // refused by nobody: a transaction's advisory locks end a moment after its table locks
			got = contender.outcome(call)
		}
		if got != want {
			t.Errorf("%s: got %s, want %s", meanwhile, got, want)
		}
		if strings.HasPrefix(want, "f") {
			if held := d.locks(contender); held != "NULL" {
				t.Errorf("%s: the failed try keeps %s", meanwhile, held)
			}
			d.want("extend_lock('k', 'W')", "true") // while the contender is open
			d.want("release_lock('k', 'W')", "true")
		}
		contender.commit()
		if strings.HasPrefix(want, "t") {
			if now := d.number("select fencing_token from distributed_locks"); now <= token {
				t.Errorf("%s: token %d after %d", meanwhile, now, token)
			}
			d.want("acquire_lock('k', 'W')", "false")
		}
		d.want(noShareOutlastsItsGroup, "0")
		d.do("delete from distributed_locks; delete from distributed_lock_shares")
	}
}

// The group runs out between the look and the lock, and a fence keeps it from being
// taken: what was locked to join it is let go, though the transaction stays open.
func TestShareThatComesTooLateToJoinKeepsNoRowLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_shared_lock('k', 'A')")
	fence := d.begin(readCommitted)
	fence.do("select assert_shared_lock_held('k', 'A')")
	other, contender := d.sessions()
	other.do("begin; lock table distributed_locks in exclusive mode")
	contender.begin(readCommitted)
	try := contender.start("acquire_shared_lock('k', 'B')")
	try.waitsFor(other)
	other.do("update distributed_lock_shares set expires_at = clock_timestamp(); update distributed_locks set expires_at = clock_timestamp(); commit")
	try.want("NULL")
	if held := d.locks(contender); held != "NULL" {
		t.Errorf("it keeps %s", held)
	}
	d.want("(select count(*) from (select from distributed_locks for update skip locked) l)", "1")
	fence.commit()
	d.want("acquire_lock('k', 'W')", "true")
}

// A renewal waits for the session that has the group locked, and then checks.
func TestRenewalOfAShareLooksOnceTheGroupIsLocked(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for meanwhile, want := range map[string]string{
		"select acquire_shared_lock('k', 'C', 60)":                                                   "true",
		"update distributed_locks set expires_at = clock_timestamp()":                                "false",
		"update distributed_lock_shares set expires_at = clock_timestamp()":                          "false",
		"select release_shared_lock('k', 'A')":                                                       "false",
		"select release_shared_lock('k', 'A'), acquire_lock('k', 'W')":                               "false",
		"select release_shared_lock('k', 'A'), acquire_shared_lock('k', 'C', 60)":                    "false",
		"update distributed_locks set expires_at = clock_timestamp(); select acquire_lock('k', 'W')": "false",
	} {
		d.do("select acquire_shared_lock('k', 'A')")
		other, holder := d.sessions()
		other.do("begin; lock table distributed_locks in exclusive mode")
		holder.begin(readCommitted)
		renewal := holder.start("extend_shared_lock('k', 'A', 600)")
		renewal.waitsFor(other)
		other.do(meanwhile + "; commit")
		renewal.want(want)
		if want == "false" { // and the next holder's row is not kept locked
			d.want("(select count(*) from (select from distributed_locks for update skip locked) l) = (select count(*) from distributed_locks)", "true")
		}
		holder.commit()
		d.do("delete from distributed_locks; delete from distributed_lock_shares")
	}
}

// The group has run out as far as others see, but who renews its share, or joins, has
// not committed: nobody takes it over meanwhile.
func TestTakeOverDoesNotOvertakeWhoRenewsOrJoins(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	works := []string{"extend_shared_lock('k0', 'A', 600)", "acquire_shared_lock('k1', 'B', 600)", "acquire_shared_lock('k2', 'A', 600)"}
	var readers []*session
	for range works {
		readers = append(readers, d.begin(readCommitted))
	}
	for i, work := range works { // while it is live
		d.do(fmt.Sprintf("select try_acquire_shared_lock('k%d', 'A', '6 s')", i))
		readers[i].want(work, "true")
	}
	await(t, d, "not exists (select from distributed_locks where expires_at > clock_timestamp())")
	for i, work := range works {
		for _, level := range levels {
			writer := d.begin(level)
			writer.want(fmt.Sprintf("acquire_lock('k%d', 'W')", i), "false")
			d.leavesNothing(writer)
			writer.done()
		}
		readers[i].commit()
		if got := d.outcome(fmt.Sprintf("acquire_lock('k%d', 'W')", i)); got != "false" {
			t.Errorf("after %s: %s", work, got)
		}
	}
	d.want(noShareOutlastsItsGroup, "0")
}

// A snapshot that does not show who joined, or renewed, since decides about nothing.
func TestOldSnapshotEndsNoGroupThatOthersShare(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, level := range levels[1:] {
		for _, since := range []string{"acquire_shared_lock('k', 'B')", "extend_shared_lock('k', 'B', 500)", "release_shared_lock('k', 'B')", "acquire_shared_lock('k', 'A')"} {
			for _, act := range []string{"release_shared_lock('k', 'A')", "extend_shared_lock('k', 'A', 10)", "acquire_shared_lock('k', 'C')", "acquire_shared_lock('k', 'A')", "release_all_locks('A')"} {
				d.do("delete from distributed_locks; delete from distributed_lock_shares; select acquire_shared_lock('k', 'A', 60)")
				if !strings.HasPrefix(since, "acquire") {
					d.do("select acquire_shared_lock('k', 'B', 60)")
				}
				s := d.begin(level)
				d.want(since, "true")
				s.want(act, "40001")
				s.done()
				d.want(noShareOutlastsItsGroup, "0")
			}
		}
	}
}

// One gives its share back while another one joins: the second sees what the
// first has left.
func TestLastReleaseAndAJoinSeeEachOther(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_shared_lock('k', 'A')")
	joiner := d.begin(readCommitted)
	joiner.want("acquire_shared_lock('k', 'B', 60)", "true")
	leaver := d.connect()
	leaves := leaver.start("release_shared_lock('k', 'A')")
	leaves.waitsFor(joiner)
	joiner.commit()
	leaves.want("true")
	d.wantShares("k", "B")
	d.want("acquire_lock('k', 'W')", "false")

	leaver.begin(readCommitted)
	leaver.want("release_shared_lock('k', 'B')", "true")
	d.want("acquire_shared_lock('k', 'C')", "NULL")
	leaver.commit()
	d.want("acquire_shared_lock('k', 'C')", "true")
	d.wantShares("k", "C")
	d.want("select count(*) from distributed_lock_shares", "1")
}

func TestReleaseAllLocksGivesSharesBackOrNothing(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.do("select acquire_lock('a', 'A'), acquire_shared_lock('b', 'A'), acquire_shared_lock('c', 'A'), acquire_shared_lock('c', 'B'), acquire_shared_lock('d', 'A')")
	d.expireShare("d", "A")
	writer := d.begin(readCommitted)
	writer.want("assert_shared_lock_held('c', 'A') > 0", "true")
	d.want("release_all_locks('A')", "55P03")
	d.want("select count(*) from distributed_locks", "4")
	d.wantShares("b", "A")
	writer.commit()
	d.want("release_all_locks('A')", "3")
	d.want("select string_agg(holder_id, ',') from distributed_lock_shares", "B")
	d.want("select string_agg(lock_name, ',') from distributed_locks", "c")

	role := d.role() // may not read shares, so it has none
	d.do("grant select, update, delete on distributed_locks to " + role + "; select acquire_lock('a', 'B')")
	d.as(role).want("release_all_locks('B')", "1")
	d.wantShares("c", "B")
}

func TestBadInputOfSharesIsNamed(t *testing.T) {
	t.Parallel()
	d := install(t)
	long := "repeat('x', 256)"
	for call, argument := range map[string]string{
		"acquire_shared_lock(null, 'A')":                                    "p_lock_name",
		"acquire_shared_lock('', 'A')":                                      "p_lock_name",
		"acquire_shared_lock(" + long + ", 'A')":                            "p_lock_name",
		"acquire_shared_lock('k', null)":                                    "p_holder_id",
		"acquire_shared_lock('k', '')":                                      "p_holder_id",
		"acquire_shared_lock('k', '*shared')":                               "p_holder_id",
		"acquire_shared_lock('k', 'A', 0)":                                  "p_ttl",
		"acquire_shared_lock('k', 'A', null)":                               "p_ttl",
		"acquire_shared_lock('k', 'A', 30, to_jsonb(repeat('x', 65536)))":   "p_metadata",
		"try_acquire_shared_lock('k', 'A', interval '101 years')":           "p_ttl",
		"extend_shared_lock(null, 'A')":                                     "p_lock_name",
		"extend_shared_lock('k', '*')":                                      "p_holder_id",
		"extend_shared_lock('k', 'A', -1)":                                  "p_ttl",
		"release_shared_lock(null, 'A')":                                    "p_lock_name",
		"release_shared_lock('k', " + long + ")":                            "p_holder_id",
		"assert_shared_lock_held(null, 'A')":                                "p_lock_name",
		"assert_shared_lock_held('k', '*shared')":                           "p_holder_id",
		"pgxlock_reap_shares(null)":                                         "p_grace",
		"pgxlock_reap_shares('-1 s')":                                       "p_grace",
		"pgxlock_reap_shares('1 s', 0)":                                     "p_limit",
		"pgxlock_try_in_turn('{k}', '{*}', '{1}', '{null}', '{0}', true)":   "p_holder_id",
		"pgxlock_try_in_turn('{k}', '{A}', '{0}', '{null}', '{0}', true)":   "p_ttl",
		"pgxlock_try_in_turn('{k,l}', '{A}', '{0}', '{null}', '{0}', true)": "every name needs a holder",
	} {
		_, err := d.query(call)
		if outcome("", err) != "22023" || !strings.Contains(fmt.Sprint(err), argument) {
			t.Errorf("%s: %v, want 22023 that names %s", call, err, argument)
		}
	}
	d.want("(select count(*) from distributed_locks) + (select count(*) from distributed_lock_shares)", "0")
}

// Readers and writers who come and go, some by running out: no writer is beside
// anybody, and no share outlasts its group.
func TestSoakReadersAndWritersExcludeEachOther(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	const names, workers = 3, 8
	rounds := pgtest.Soak(t, 60, 10_000)
	var readers, writers [names]atomic.Int32
	var granted [2]atomic.Int64
	var wg sync.WaitGroup
	for w := range workers {
		s := d.connect()
		wg.Go(func() {
			me := fmt.Sprint("w", w)
			for range rounds {
				n := rand.IntN(names)
				if rand.IntN(4) == 0 {
					if got := s.outcome(fmt.Sprintf("acquire_lock('k%d', '%s')", n, me)); got == "true" {
						granted[0].Add(1)
						if writers[n].Add(1) != 1 || readers[n].Load() != 0 {
							t.Errorf("%d writers and %d readers", writers[n].Load(), readers[n].Load())
						}
						writers[n].Add(-1)
						s.want(fmt.Sprintf("release_lock('k%d', '%s')", n, me), "true")
					}
					continue
				}
				if got := s.outcome(fmt.Sprintf("acquire_shared_lock('k%d', '%s', 60)", n, me)); !oneOf(got, "true|false|NULL") {
					t.Errorf("acquire: %s", got)
				} else if got == "true" {
					granted[1].Add(1)
					readers[n].Add(1)
					if writers[n].Load() != 0 {
						t.Errorf("%d writers beside a reader", writers[n].Load())
					}
					s.want(fmt.Sprintf("extend_shared_lock('k%d', '%s', 30)", n, me), "true")
					s.want(noShareOutlastsItsGroup, "0")
					readers[n].Add(-1)
					s.want(fmt.Sprintf("release_shared_lock('k%d', '%s')", n, me), "true")
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d writers, %d readers", granted[0].Load(), granted[1].Load())
	if granted[0].Load() == 0 || granted[1].Load() == 0 {
		t.Error("one kind was never granted")
	}
	d.want("(select count(*) from distributed_locks) + (select count(*) from distributed_lock_shares)", "0")
}
