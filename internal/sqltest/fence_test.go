package sqltest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A asserts the lease and leaves its transaction open. Nobody can end the lease
// or take it over until then, though it expires; nobody waits; and who was
// refused has left nothing behind.
func TestFencePinsTheLeaseUntilItsTransactionEnds(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, end := range []string{"commit", "rollback"} {
			first := d.token("k", "A")
			writer := d.begin(level)
			writer.want(fmt.Sprintf("assert_lock_held('k', 'A', %d)", first), fmt.Sprint(first))
			d.want("release_lock('k', 'A')", "55P03")
			d.want(fmt.Sprintf("release_lock_fenced('k', 'A', %d)", first), "55P03")
			d.want("release_all_locks('A')", "55P03")
			d.expire("k")

			for _, other := range levels {
				thief := d.begin(other)
				thief.want("acquire_lock('k', 'B')", "false")
				d.leavesNothing(thief)
				thief.done()
			}
			d.want("release_lock('k', 'A')", "false") // its row stays
			d.want("reap_expired_locks('0 s')", "0")

			writer.do(end)
			if second := d.token("k", "B"); second <= first {
				t.Errorf("token %d after %d", second, first)
			}
			d.want("release_lock('k', 'B')", "true")
		}
	})
}

// An operator deletes the row. What the fence promised its transaction holds:
// the next holder is granted when that has ended.
func TestFenceProtectsThoughTheRowIsDeletedByHand(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_lock('k', 'A')")
	writer := d.begin(readCommitted)
	writer.do("select assert_lock_held('k', 'A')")
	d.do("delete from distributed_locks")
	thief := d.begin(readCommitted)
	thief.want("acquire_lock('k', 'B')", "false")
	d.leavesNothing(thief)
	writer.commit()
	thief.want("acquire_lock('k', 'B')", "true")
}

func TestFenceLetsTheHolderRenew(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		token := d.token("k", "A")
		writer := d.begin(level)
		for range 2 { // the second one after renewals that the snapshot does not show
			writer.want("assert_lock_held('k', 'A')", fmt.Sprint(token))
			d.want("extend_lock('k', 'A')", "true")
			d.want("acquire_lock('k', 'A')", "true")
			d.want(fmt.Sprintf("renew_lock('k', 'A', %d) > clock_timestamp()", token), "true")
		}
		// An open renewal is in nobody's way either.
		holder := d.begin(readCommitted)
		holder.want("extend_lock('k', 'A')", "true")
		writer.want("assert_lock_held('k', 'A')", fmt.Sprint(token))
		holder.commit()
		writer.commit()
	})
}

func TestFencesOfOneLeaseDoNotDisturbEachOther(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_lock('k', 'A')")
	for _, level := range levels {
		d.begin(level).want("assert_lock_held('k', 'A') > 0", "true")
	}
}

func TestFencedTransactionItselfMayRelease(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("select acquire_lock('k', 'A')")
		writer := d.begin(level)
		writer.want("assert_lock_held('k', 'A') > 0", "true")
		writer.want("release_lock('k', 'A')", "true")
		d.want("acquire_lock('k', 'B')", "false") // not before the commit
		writer.commit()
		d.want("acquire_lock('k', 'B')", "true")
	})
}

// The pin belongs to the savepoint in which it was taken. That is documented:
// fence at the top level, or begin again.
func TestFenceInASavepointThatIsRolledBackProtectsNoMore(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, fence := range []string{
			"savepoint s; select assert_lock_held('k', 'A'); rollback to s",
			`do $$ begin perform assert_lock_held('k', 'A'); raise 'undone';
			exception when raise_exception then null; end $$`,
		} {
			d.do("select acquire_lock('k', 'A')")
			writer := d.begin(level)
			writer.do(fence)
			d.expire("k")
			d.want("acquire_lock('k', 'B')", "true") // while the writer is open
			writer.want("assert_lock_held('k', 'A')", map[bool]string{true: "LK001", false: "40001"}[level == readCommitted])
			writer.rollback()
			d.want("release_lock('k', 'B')", "true")
		}
	})
}

func TestFenceInASavepointThatIsKeptProtects(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_lock('k', 'A')")
	writer := d.begin(readCommitted)
	writer.do("savepoint s; select assert_lock_held('k', 'A'); release s")
	d.expire("k")
	d.want("acquire_lock('k', 'B')", "false")
}

// Somebody is about to end A's lease or share, or to take the lease over, and has not committed.
// The fence does not wait for the outcome. In the older snapshot a renewal came
// between, which PostgreSQL's row locks alone would wait behind.
func TestFenceNeverWaits(t *testing.T) {
	t.Parallel()
	const expired, live = true, false
	for kind, c := range map[string]struct {
		acquire, extend, assert string
		expire                  func(*database)
		works                   map[string]bool // whether they need an expired lease
	}{
		"exclusive": {"acquire_lock('k', 'A')", "extend_lock('k', 'A')", "assert_lock_held('k', 'A', NULL, true)", func(d *database) { d.expire("k") }, map[string]bool{
			"acquire_lock('k', 'B')":    expired,
			"reap_expired_locks('0 s')": expired,
			"release_lock('k', 'A')":    live,
		}},
		"shared": {"acquire_shared_lock('k', 'A')", "extend_shared_lock('k', 'A')", "assert_shared_lock_held('k', 'A', NULL, true)", func(d *database) { d.expireGroup("k") }, map[string]bool{
			"acquire_lock('k', 'W')":         expired,
			"acquire_shared_lock('k', 'B')":  expired,
			"reap_expired_locks('0 s')":      expired,
			"release_shared_lock('k', 'A')":  live,
			"pgxlock_reap_shares('0 s') > 0": expired,
		}},
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			atEveryLevel(t, func(t *testing.T, d *database, level string) {
				for work, expired := range c.works {
					d.do("delete from distributed_lock_shares; delete from distributed_locks; select " + c.acquire)
					writer := d.begin(level)
					d.want(c.extend, "true")
					if expired {
						c.expire(d)
					}
					other := d.begin(readCommitted)
					other.do("select " + work)
					writer.want(c.assert, "LK001")
					writer.done()
					other.done()
					d.want(c.assert+" > 0", "true")
				}
			})
		})
	}
}

// A is about to pin its lease; B takes it over and commits. What A reads after
// that must be what B left: a read with the snapshot from before would let A
// write after B.
func TestFenceSeesATakeOverThatCommitsJustBeforeThePin(t *testing.T) {
	t.Parallel()
	atEveryLevelGated(t, func(t *testing.T, d *database, level string) {
		gate := d.turnstile()
		token := d.token("k", "A")
		writer := d.begin(level)
		fence := gate.stop(writer, "pin", fmt.Sprintf("assert_lock_held('k', 'A', %d, true)", token))
		d.expire("k")
		d.want("acquire_lock('k', 'B')", "true")
		gate.open()
		if level == readCommitted {
			fence.want("LK001")
		} else {
			fence.want("40001")
		}
	})
}

func TestFenceSaysWhyItFails(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("select acquire_lock('held', 'A'), acquire_lock('expired', 'A'), acquire_lock('renewed', 'A')")
		d.expire("expired")
		token := d.number("select fencing_token from distributed_locks where lock_name = 'held'")
		inSnapshot := "LK002" // which may hide a renewal, or an acquisition
		if level == readCommitted {
			inSnapshot = "LK001"
		}
		for fence, want := range map[string]string{
			"assert_lock_held('held', 'B')":                                "LK001",
			fmt.Sprintf("assert_lock_held('held', 'A', %d)", token-1):      "LK001",
			fmt.Sprintf("assert_lock_held('held', 'A', %d)", token+1):      "LK001",
			"assert_lock_held('expired', 'A')":                             inSnapshot,
			"assert_lock_held('expired', 'A', NULL, true) > 0":             "true",
			"assert_lock_held('expired', 'B', NULL, true)":                 "LK001",
			fmt.Sprintf("assert_lock_held('held', 'A', %d)", token):        fmt.Sprint(token),
			fmt.Sprintf("assert_lock_held('held', 'A', %d, false)", token): fmt.Sprint(token),
			"assert_lock_held('free', 'A')":                                inSnapshot,
		} {
			writer := d.begin(level)
			writer.want(fence, want)
			writer.rollback()
		}
		d.want("select count(*) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())", "0")
	})
}

// Reading under a lease is not what a fence protects: a session that only reads gets
// told instead of a false feeling of safety.
func TestFenceRefusesAReadOnlyTransaction(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("select acquire_lock('k', 'A')")
		d.begin(level+" read only").want("assert_lock_held('k', 'A')", "25006")
	})
}

// A healthy lease that is younger than the snapshot is not a lost one.
func TestFenceTellsAStaleSnapshotFromALostLease(t *testing.T) {
	t.Parallel()
	d := install(t)
	for _, level := range levels[1:] {
		t.Run(level, func(t *testing.T) {
			d := d.reopen(t)
			writer := d.begin(level)
			d.do("select acquire_lock('k', 'A')")
			writer.want("assert_lock_held('k', 'A')", "LK002")
			writer.rollback()

			// Taken since the snapshot, by take-over or by release and acquire.
			for name, take := range map[string]string{
				"expired":  "acquire_lock('k', 'B')",
				"released": "release_lock('k', 'A')",
			} {
				d.do("delete from distributed_locks; select acquire_lock('k', 'A')")
				writer.begin(level)
				if name == "expired" {
					d.expire("k")
				}
				d.do("select " + take)
				writer.want("assert_lock_held('k', 'A')", "40001|LK001")
				writer.rollback()
			}
		})
	}
}

// Transactions that only fence do not abort each other in SERIALIZABLE, even
// though their leases share a page and are renewed meanwhile.
func TestSerializableTransactionsThatOnlyFenceDoNotAbortEachOther(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("create table work (id int); insert into work select generate_series(1, 3)")
	const n = 8
	writers := make([]*session, n)
	for i := range writers {
		d.do(fmt.Sprintf("select acquire_lock('k%d', 'A')", i))
	}
	for i := range writers {
		writers[i] = d.begin("serializable")
	}
	for i, w := range writers {
		w.want(fmt.Sprintf("assert_lock_held('k%d', 'A') > 0", i), "true")
		d.want(fmt.Sprintf("extend_lock('k%d', 'A')", i), "true")
	}
	for i, w := range writers {
		w.do(fmt.Sprintf("insert into work values (%d)", 10+i))
	}
	for _, w := range writers {
		w.commit()
	}
}

// NULL is not "yes": a comparison with it must not let an expired lease pass.
func TestFenceThatIsNotToldWhetherAnExpiredLeaseWillDoRefusesIt(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("select acquire_lock('live', 'A'), acquire_lock('expired', 'A')")
		d.expire("expired")
		for fence, want := range map[string]string{
			"assert_lock_held('live', 'A', NULL, NULL) > 0": "true",
			"assert_lock_held('live', 'B', NULL, NULL)":     "LK001",
			"assert_lock_held('live', 'A', 1, NULL)":        "LK001",
			"assert_lock_held('expired', 'A', NULL, NULL)":  "LK001|LK002",
			"assert_lock_held('expired', 'B', NULL, NULL)":  "LK001",
			"assert_lock_held('expired', 'B', NULL, true)":  "LK001",
		} {
			s := d.begin(level)
			s.want(fence, want)
			s.rollback()
		}
	})
}

// The snapshot shows a lease that has expired, but it was renewed since. That is
// no lost lease, and cannot be told from one without asking again.
func TestFenceWhoseSnapshotHidesTheRenewalSaysSo(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		token := d.token("k", "A")
		for _, fence := range []struct{ expression, committed, snapshot string }{
			{"assert_lock_held('k', 'A')", fmt.Sprint(token), "LK002"},
			{"assert_lock_held('k', 'A', %d)", fmt.Sprint(token), "LK002"},
			{"assert_lock_held('k', 'A', %d, p_allow_expired => true)", fmt.Sprint(token), fmt.Sprint(token)},
			{"assert_lock_held('k', 'B', p_allow_expired => true)", "LK001", "LK001"},
		} {
			d.expire("k")
			writer := d.begin(level)
			// What a renewal does, which cannot be had after the expiry.
			d.do("update distributed_locks set expires_at = clock_timestamp() + interval '1 minute'")
			want := fence.snapshot
			if level == readCommitted {
				want = fence.committed
			}
			writer.want(strings.ReplaceAll(fence.expression, "%d", fmt.Sprint(token)), want)
			writer.rollback()
		}
	})
}

// After a renewal that the snapshot does not show, SKIP LOCKED waits all the
// same. (There is nothing to wait for in READ COMMITTED.)
func TestFenceDoesNotWaitForARowThatIsLockedByHand(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("select acquire_lock('k', 'A')")
		for _, renewed := range []bool{false, true} {
			writer := d.begin(level)
			writer.do("set local lock_timeout = 0; savepoint s")
			if renewed {
				d.want("extend_lock('k', 'A')", "true")
			}
			other := d.begin(readCommitted)
			other.do("select from distributed_locks for update")
			want := "LK001"
			if renewed {
				want = "55P03|LK001"
			}
			if level == readCommitted {
				want = "true"
			}
			writer.want("assert_lock_held('k', 'A') > 0", want)
			writer.do("rollback to s")
			writer.want("current_setting('lock_timeout')", "0")
			other.done()
			writer.want("assert_lock_held('k', 'A') > 0", "true")
			writer.done()
		}
	})
}

// A former holder asserts, and has the pin until it is refused: on a busy machine for a while. The
// holder's release is no concern of its.
func TestReleaseWaitsForAnAssertThatIsAboutToFail(t *testing.T) {
	t.Parallel()
	d := install(t)
	former, holder := d.sessions()
	for _, release := range []struct{ acquire, pin, release string }{
		{"acquire_lock('k', 'A')", "pgxlock_key('pin', 'k')", "release_lock('k', 'A')"},
		{"acquire_shared_lock('k', 'A')", "pgxlock_share_pin('k', 'A')", "release_shared_lock('k', 'A')"},
	} {
		released := false
		for range 20 { // a machine that stands still for half a second has it refused
			d.want(release.acquire, "true")
			former.begin(readCommitted)
			former.do("select pg_advisory_xact_lock_shared(" + release.pin + ")")
			waiting := holder.start(release.release)
			released = waiting.waits(fmt.Sprintf("exists (select from pg_stat_activity where pid = %d and wait_event = 'PgSleep')", holder.pid))
			former.rollback()
			if waiting.want("true|55P03"); waiting.got == "true" && released {
				break
			}
			released = false
			d.do("select " + release.release)
		}
		if !released {
			t.Errorf("%s was refused at once, or never got through", release.release)
		}
	}
}
