// Shared leases: fences, batches, the queue, and housekeeping.

package sqltest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A reader asserts its share and leaves its transaction open. Though all shares run
// out, no writer comes until it ends; other readers do as they like.
func TestFenceOfAShareKeepsWritersOutUntilItsTransactionEnds(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, end := range []string{"commit", "rollback"} {
			token := d.number("(try_acquire_shared_lock('k', 'A')).fencing_token")
			reader := d.begin(level)
			reader.want(fmt.Sprintf("assert_shared_lock_held('k', 'A', %d)", token), fmt.Sprint(token))
			d.want("acquire_shared_lock('k', 'B')", "true")
			d.want("extend_shared_lock('k', 'A') and extend_shared_lock('k', 'B')", "true")
			reader.want("assert_shared_lock_held('k', 'A', null, true) > 0", "true") // renewed since the snapshot
			d.want("assert_shared_lock_held('k', 'B') > 0", "true")
			d.want("release_shared_lock('k', 'B')", "true")
			d.want("release_shared_lock('k', 'A')", "55P03")
			d.want("pgxlock_release_shares_batch('{k}', '{A}', '{null}')", "skipped")
			d.expireGroup("k")
			for _, other := range levels {
				writer := d.begin(other)
				writer.want("acquire_lock('k', 'W')", "false")
				d.leavesNothing(writer)
				writer.want("acquire_shared_lock('k', 'C')", "NULL")
				d.leavesNothing(writer)
				writer.done()
			}
			d.want("reap_expired_locks('0 s')", "0")
			d.want("pgxlock_reap_shares('0 s')", "0")
			reader.do(end)
			if next := d.token("k", "W"); next <= token {
				t.Errorf("token %d after %d", next, token)
			}
			d.want("release_lock('k', 'W')", "true")
		}
	})
}

// A reader has run out, and writes in a fenced transaction. The others, who are well,
// leave: they are not kept from it, and no writer comes in before it ends.
func TestLeavingReaderLetsNoCallerPassTheFenceOfAnExpiredOne(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("select acquire_shared_lock('k', 'A'), acquire_shared_lock('k', 'B'), acquire_shared_lock('k', 'C')")
		d.expireShare("k", "A")
		writes := d.begin(level)
		writes.want("assert_shared_lock_held('k', 'A', null, true) > 0", "true")
		d.want("(select string_agg(r, ',') from pgxlock_release_shares_batch('{k,k}', '{B,C}', '{null,null}') r)", "left,released")
		d.want("select string_agg(holder_id, ',') from distributed_lock_shares", "A")
		d.want("select expires_at <= clock_timestamp() from distributed_locks", "true")
		d.want("acquire_lock('k', 'W')", "false")
		d.want("acquire_shared_lock('k', 'D')", "NULL")
		writes.commit()
		d.want("acquire_lock('k', 'W')", "true")
	})
}

func TestFencedTransactionItselfMayGiveItsShareBack(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("select acquire_shared_lock('k', 'A')")
		writer := d.begin(level)
		writer.want("assert_shared_lock_held('k', 'A') > 0", "true")
		writer.want("release_shared_lock('k', 'A')", "true")
		d.want("acquire_lock('k', 'W')", "false") // not before the commit
		writer.commit()
		d.want("acquire_lock('k', 'W')", "true")
	})
}

// A reader is about to take the pin of the name, or that of its share. Meanwhile the
// lock goes to a writer, or its share is given back.
func TestFenceOfAShareSeesWhatCommitsJustBeforeItsPins(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevelGated(t, func(t *testing.T, d *database, level string) {
		gate := d.turnstile()
		for _, space := range []string{"pin", "share"} {
			for _, meanwhile := range []string{
				"delete from distributed_locks where lock_name = 'k'; select acquire_lock('k', 'W')",
				"select release_shared_lock('k', 'A')",
				"select release_shared_lock('k', 'A'), acquire_lock('k', 'W')",
				"select acquire_shared_lock('k', 'B'), release_shared_lock('k', 'A')",
			} {
				d.do("delete from distributed_locks; delete from distributed_lock_shares; select acquire_shared_lock('k', 'A')")
				writer := d.begin(level)
				fence := gate.stop(writer, space, "assert_shared_lock_held('k', 'A', null, true)")
				if space == "share" && strings.Contains(meanwhile, "acquire_lock") {
					d.want("acquire_lock('k', 'W')", "false") // it has the pin of the name
					gate.open()
					fence.want(d.get("select fencing_token from distributed_locks"))
					writer.rollback()
					continue
				}
				d.do(meanwhile)
				gate.open()
				if level == readCommitted {
					fence.want("LK001")
				} else {
					fence.want("40001")
				}
				writer.rollback()
			}
		}
	})
}

func TestFenceOfAShareLetsOthersJoinAndExtend(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, work := range []string{"acquire_shared_lock('k', 'B')", "extend_shared_lock('k', 'A')", "acquire_shared_lock('k', 'A')"} {
			d.do("delete from distributed_lock_shares; delete from distributed_locks; select acquire_shared_lock('k', 'A')")
			writer, other := d.begin(level), d.begin(readCommitted)
			other.want(work, "true")
			writer.want("assert_shared_lock_held('k', 'A') > 0", "true")
			other.commit()
			other.done()
			writer.commit()
			writer.done()
		}
	})
}

func TestFenceOfAShareSaysWhyItFails(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("delete from distributed_lock_shares; select acquire_shared_lock('k', 'A'), acquire_shared_lock('k', 'old'), acquire_lock('alone', 'A')")
		d.expireShare("k", "old")
		token := d.number("select fencing_token from distributed_lock_shares where holder_id = 'A'")
		inSnapshot := "LK002" // which may hide a renewal, or an acquisition
		if level == readCommitted {
			inSnapshot = "LK001"
		}
		for fence, want := range map[string]string{
			"assert_shared_lock_held('k', 'B')":                               inSnapshot,
			"assert_shared_lock_held('free', 'A')":                            inSnapshot,
			"assert_shared_lock_held('alone', 'A')":                           inSnapshot,
			"assert_lock_held('k', 'A')":                                      "LK001",
			fmt.Sprintf("assert_shared_lock_held('k', 'A', %d)", token+1):     "LK001",
			fmt.Sprintf("assert_shared_lock_held('k', 'A', %d)", token):       fmt.Sprint(token),
			"assert_shared_lock_held('k', 'old')":                             inSnapshot,
			"assert_shared_lock_held('k', 'old', null, true)":                 fmt.Sprint(token),
			fmt.Sprintf("assert_shared_lock_held('k', 'old', %d, true)", 1):   "LK001",
			fmt.Sprintf("assert_shared_lock_held('k', 'A', %d, null)", token): fmt.Sprint(token),
		} {
			writer := d.begin(level)
			writer.want(fence, want)
			writer.rollback()
		}
		d.begin(level+" read only").want("assert_shared_lock_held('k', 'A')", "25006")
		late := d.begin(level)
		d.want("acquire_shared_lock('k', 'late')", "true")
		late.want("assert_shared_lock_held('k', 'late') > 0", map[bool]string{true: "true", false: "LK002"}[level == readCommitted])
	})
}

// A pin stands for one share: what it is made of does not run together.
func TestPinsOfSharesAreNotMixedUp(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.want("select count(distinct pgxlock_share_pin(n, h)) from (values ('a', 'bc'), ('ab', 'c'), ('1:a', 'b'), ('1', ':ab'), ('a', 'b'), ('b', 'a')) v (n, h)", "6")
	d.do("select acquire_shared_lock('a', 'bc'), acquire_shared_lock('ab', 'c')")
	d.begin(readCommitted).want("assert_shared_lock_held('a', 'bc') > 0", "true")
	d.want("release_shared_lock('ab', 'c')", "true")
}

// shareBatch takes shares for one holder, and says of each what became of it.
func shareBatch(holder, tickets string, names ...string) string {
	each := func(value string) string { return strings.TrimSuffix(strings.Repeat(value+",", len(names)), ",") }
	return fmt.Sprintf("(select string_agg(concat_ws(' ', b.acquired, b.ahead, b.held_by), ',' order by n) from pgxlock_try_in_turn('{%s}', '{%s}', '{%s}', '{%s}', '{%s}', true) with ordinality as b (acquired, token, held_by, ms, ahead, n))",
		strings.Join(names, ","), each(holder), each("60000"), each("null"), tickets)
}

// One that is held, or that somebody is just working on, costs the others nothing.
func TestBatchOfSharesAnswersForEach(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.do("select acquire_lock('alone', 'W'), acquire_shared_lock('shared', 'A'), acquire_shared_lock('joined', 'A'), acquire_shared_lock('fenced', 'A'), acquire_shared_lock('mine', 'B')")
	d.begin(readCommitted).do("select acquire_shared_lock('joined', 'X')")
	d.begin(readCommitted).do("select acquire_shared_lock('made', 'X')")
	d.begin(readCommitted).do("select assert_shared_lock_held('fenced', 'A')")
	d.want(shareBatch("B", "0,0,0,0,0,0,0", "alone", "shared", "joined", "fenced", "mine", "made", "new"),
		"f f W,t f B,f f *shared,t f B,t f B,f f,t f B")
	d.want(`(select string_agg(r, ',' order by n) from pgxlock_renew_shares_batch('{alone,shared,joined,fenced,none,mine}', '{W,B,A,A,B,B}', '{null,null,null,null,null,7}', '{1000,1000,1000,1000,1000,1000}') with ordinality b (r, n))`,
		"gone,renewed,skipped,renewed,gone,gone")
	for _, ttl := range []string{"-1", "0", "9000000000000000", "null"} {
		d.want("pgxlock_renew_shares_batch('{mine}', '{B}', '{null}', '{"+ttl+"}')", "skipped")
	}
	d.want(`(select string_agg(r, ',' order by n) from pgxlock_release_shares_batch('{alone,shared,shared,shared,joined,fenced,fenced,mine,mine,mine,*}', '{W,B,A,C,A,A,B,B,B,B,*}', '{null,null,null,null,null,null,null,7,null,null,null}') with ordinality b (r, n))`,
		"gone,left,released,gone,skipped,skipped,left,gone,released,gone,gone")
	d.want("select string_agg(lock_name, ',' order by lock_name) from distributed_locks", "alone,fenced,joined,new")
	d.expireGroup("new")
	d.want("pgxlock_release_shares_batch('{new}', '{B}', '{null}')", "expired")
}

// Many shares of one name in a batch raise their group once, to the latest of them.
func TestBatchOfRenewalsRaisesEachGroupToItsLatest(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	// In minutes, so that none of it runs out meanwhile.
	d.do("select acquire_shared_lock('k', 'h' || i, 600) from generate_series(1, 50) i; select acquire_shared_lock('l', 'h1', 300000)")
	d.want(`(select string_agg(distinct r, ',') from pgxlock_renew_shares_batch(
		(select array_agg('k'::text) || '{k,l}' from generate_series(1, 50)), (select array_agg('h' || i) || '{h1,h1}' from generate_series(1, 50) i),
		(select array_agg(null::bigint) from generate_series(1, 52)), (select array_agg(i * 60000) || '{60000,120000}' from generate_series(1, 50) i)) r)`, "renewed")
	d.want("select string_agg(lock_name || ' ' || round(extract(epoch from expires_at - clock_timestamp()) / 60), ',' order by lock_name) from distributed_locks", "k 50,l 5000")
	d.want("select expires_at > clock_timestamp() + interval '4990 min' from distributed_lock_shares where lock_name = 'l'", "true") // none becomes shorter
	d.want(noShareOutlastsItsGroup, "0")

	// What has run out is not revived, be it one or all of a group.
	d.expireShare("k", "h7")
	d.expireGroup("l")
	d.want("(select string_agg(r, ',' order by n) from pgxlock_renew_shares_batch('{k,k,l}', '{h7,h8,h1}', '{null,null,null}', '{60000,60000,60000}') with ordinality b (r, n))", "gone,renewed,gone")
	d.want("select count(*) from distributed_lock_shares where expires_at <= clock_timestamp()", "2")
}

// A share is taken in turn, as an exclusive lock is; without a place it barges.
func TestSharesAreTakenInTurn(t *testing.T) {
	t.Parallel()
	d := install(t)
	publish := func(ticket int) {
		t.Helper()
		d.do(fmt.Sprintf("select pgxlock_publish_batch('{0}', '{k}', '{%d}', '{1}', '{null}', null, 'o', 60000, 1)", ticket))
	}
	d.do("select acquire_shared_lock('k', 'A'), setval('pgxlock_tickets', 2000)")
	publish(1000) // a writer
	publish(2000) // and a reader behind it
	d.want(shareBatch("B", "0", "k"), "f t *shared")
	d.do("select pgxlock_wake_batch('{0}', '{k}', '{null}'); update pgxlock_waiters set woken = clock_timestamp() where ticket = 2000")
	d.keep("1000")
	d.want(shareBatch("B", "2000", "k"), "f t *shared")
	d.want("select string_agg(ticket || ' ' || (woken is null), ',' order by ticket) from pgxlock_waiters", "1000 false,2000 true")
	d.want(shareBatch("C", "null", "k"), "t f C")
	d.want(shareBatch("D", "999", "k"), "t f D")
	d.do("select pgxlock_withdraw_batch('{0}', '{k}', '{1000}')")
	d.want(shareBatch("B", "2000", "k"), "t f B")
	d.want("select count(*) from pgxlock_waiters", "0")
	s := d.begin("repeatable read")
	s.want(shareBatch("E", "0", "k"), "25001")
}

// A waits for what B shares, and B for what A has: the last one leaves.
func TestCircleOfWaitsThroughAGroupIsFound(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_shared_lock('k', 'A'), acquire_shared_lock('k', 'B'), acquire_lock('l', 'C')")
	publish := func(name, ticket, holds string) string {
		return "(select coalesce(deadlock, 'none') from pgxlock_publish_batch('{0}', '{" + name + "}', '{" + ticket + `}', '{1}', array['["` + holds + `"]'], null, 'o', 60000, 1))`
	}
	d.want(publish("l", "1", "B"), "none")
	d.want(publish("k", "2", "X"), "none")
	d.want(publish("k", "3", "C"), "C")
	d.want(publish("l", "1", "B"), "none")
	d.do("select release_shared_lock('k', 'B')")
	d.want(publish("k", "3", "C"), "none")
}

func TestReapingSharesRemovesWhatExpiredLongerAgoThanTheGrace(t *testing.T) {
	t.Parallel()
	d := install(t)
	const left = "select string_agg(lock_name || ' ' || holder_id || ' ' || state, ',' order by lock_name, holder_id) from lock_shares"
	d.do(`select acquire_shared_lock('live', 'A'), acquire_shared_lock('live', 'crashed'), acquire_shared_lock('over', 'A'), acquire_shared_lock('over', 'B'), acquire_shared_lock('taken', 'A'), acquire_shared_lock('fenced', 'A');
		update distributed_lock_shares set expires_at = clock_timestamp() - interval '2 hours' where (lock_name, holder_id) <> ('live', 'A');
		update distributed_locks set expires_at = clock_timestamp() - interval '2 hours' where lock_name <> 'live'; select acquire_lock('taken', 'W')`)
	fence := d.begin(readCommitted)
	fence.do("select assert_shared_lock_held('fenced', 'A', null, true)")
	d.want(left, "fenced A abandoned,live A live,live crashed abandoned,over A abandoned,over B abandoned,taken A abandoned")
	d.want("pgxlock_reap_shares('3 hours')", "0")
	d.want("reap_expired_locks()", "1") // the group's row; its shares stay for the next call
	d.want("pgxlock_reap_shares(p_limit => 1)", "1")
	d.want("pgxlock_reap_shares() + pgxlock_reap_shares()", "2")
	d.want(left, "fenced A abandoned,live A live,taken A abandoned")
	d.want("release_lock('taken', 'W')", "true")
	fence.commit()
	d.want("pgxlock_reap_shares()", "2")
	d.want(left, "live A live")
	for _, level := range levels[1:] {
		d.begin(level).want("pgxlock_reap_shares()", "25001")
	}
}

// Shares that somebody works with are left for the next time, and a reaper that has
// not committed keeps nothing of them.
func TestReapingSharesSkipsWhatIsInUse(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do(`select acquire_shared_lock(k, 'A') from unnest('{fenced,locked,joined,taken,released,made,idle,left}'::text[]) k;
		update distributed_lock_shares set expires_at = clock_timestamp() - interval '1 s'; update distributed_locks set expires_at = clock_timestamp() - interval '1 s';
		delete from distributed_locks where lock_name in ('made', 'left')`)
	for _, work := range []string{
		"assert_shared_lock_held('fenced', 'A', null, true)",
		"select holder_id from distributed_lock_shares where lock_name = 'locked' for update",
		"acquire_shared_lock('joined', 'A')",
		"acquire_lock('taken', 'W')",
		"release_shared_lock('released', 'A')",
		"acquire_shared_lock('made', 'A')",
	} {
		d.begin(readCommitted).get(work)
	}
	reaper := d.begin(readCommitted)
	reaper.want("pgxlock_reap_shares('0 s')", "2")
	d.want("(select count(*) from (select from distributed_locks where lock_name = 'fenced' for update skip locked) l)", "1") // while it is open
	// Nobody waits for it.
	for _, name := range []string{"idle", "left"} {
		d.want("acquire_shared_lock('"+name+"', 'A')", "NULL")
	}
	reaper.commit()
	d.want("select string_agg(lock_name, ',' order by lock_name) from distributed_lock_shares", "fenced,joined,locked,made,released,taken")
}

// Who holds a lock, exclusively or together, with what it said of itself.
func TestHoldersAreEachOfThoseWhoShare(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do(`select acquire_shared_lock('k', 'A', 60, '"pod"'), acquire_shared_lock('k', 'B', 60, '{"n": 1}'), acquire_shared_lock('k', 'C'), acquire_lock('l', 'W', 60, '"me"')`)
	d.expireShare("k", "C")
	const of = "select string_agg(concat_ws(' ', h.holder, nullif(h.metadata, ''), h.shared), ',' order by h.holder) from pgxlock_holders('%s') h"
	d.want(fmt.Sprintf(of, "k"), `A pod t,B {"n": 1} t`)
	d.want(fmt.Sprintf(of, "l"), "W me f")
	d.want(fmt.Sprintf(of, "free"), "NULL")
	d.want("select string_agg(concat_ws(' ', lock_name, holder_id, state), ',' order by lock_name) from lock_leases", "k *shared live,l W live")
	// The same holder keeps when it came, and what it said, unless it says something else.
	since := d.get("select acquired_at from distributed_lock_shares where holder_id = 'A'")
	d.do("select acquire_shared_lock('k', 'A'), acquire_shared_lock('k', 'B', 60, '[]')")
	d.want("select acquired_at from distributed_lock_shares where holder_id = 'A'", since)
	d.want(fmt.Sprintf(of, "k"), "A pod t,B [] t")
	d.expireShare("k", "A")
	d.do("select acquire_shared_lock('k', 'A')")
	d.want(fmt.Sprintf(of, "k"), "A t,B [] t")
	d.want("select acquired_at > '"+since+"' from distributed_lock_shares where holder_id = 'A'", "true")
}
