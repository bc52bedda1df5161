// Releases of expired leases and shares.

package sqltest_test

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// Transactions that have the lease's pin while it is released: a transaction that takes it over,
// removes it, or asserted it when it was live.
var pinnedBy = map[string]string{
	"take-over":               "acquire_lock('k', 'B')",
	"take-over by a batch":    "(select bool_and(acquired) from pgxlock_acquire_each('{k}', '{B}', '{60000}', '{null}'))",
	"take-over by a reader":   "acquire_shared_lock('k', 'B')",
	"removal":                 "reap_expired_locks('0 s') = 1",
	"assertion":               "assert_lock_held('k', 'A', null, true) > 0",
	"release in another form": "not release_lock('k', 'A')",
}

func TestReleaseOfAnExpiredLeaseReturnsFalse(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for name, pins := range pinnedBy {
			for _, end := range []string{"commit", "rollback"} {
				token := d.token("k", "A")
				d.expire("k")
				other := d.begin(readCommitted)
				other.want(pins, "true")

				holder := d.connect()
				for release, want := range map[string]string{
					"release_lock('k', 'A')":                                        "false",
					fmt.Sprintf("release_lock_fenced('k', 'A', %d)", token):         "false",
					"release_all_locks('A')":                                        "0",
					"lower(pgxlock_release_batch('{k}', '{A}', '{null}'))":          "e",
					"lower(pgxlock_release_one('k', 'A', null))":                    "e",
					"lower(pgxlock_release_batch('{k,k}', '{A,A}', '{null,null}'))": "ee",
				} {
					holder.begin(level)
					if got := holder.outcome(release); got != want {
						t.Errorf("%s: %s: got %s, want %s", name, release, got, want)
					}
					holder.rollback()
				}
				if got := d.get("acquire_lock('k', 'C')"); got != "false" {
					t.Errorf("%s: passed by another holder", name)
				}
				other.do(end)
				other.done()
				holder.done()
				d.do("delete from distributed_locks; delete from distributed_lock_shares")
			}
		}
	})
}

// What the transaction's snapshot shows as expired was renewed since.
func TestReleaseByAnOldSnapshotDoesNotCallALiveLeaseExpired(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, level := range levels[1:] {
		d.do("select acquire_lock('k', 'A')")
		d.expire("k")
		holder := d.begin(level)
		d.do("update distributed_locks set expires_at = clock_timestamp() + interval '1 h'") // as if it had been, before it expired
		writer := d.begin(readCommitted)
		writer.want("assert_lock_held('k', 'A') > 0", "true")
		holder.want("release_lock('k', 'A')", "40001")
		holder.done()
		writer.commit()
		writer.done()
		d.want("release_lock('k', 'A')", "true")
	}
}

func TestReleaseOfAnExpiredShareReturnsFalse(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for name, test := range map[string]struct{ expired, locked string }{
			"take-over of the group":   {"group", "acquire_lock('k', 'W')"},
			"removal of the group":     {"group", "reap_expired_locks('0 s') = 1"},
			"assertion of the share":   {"share", "assert_shared_lock_held('k', 'A', null, true) > 0"},
			"join of another reader":   {"share", "acquire_shared_lock('k', 'C')"},
			"release of another share": {"share", "release_shared_lock('k', 'B')"},
		} {
			d.do("select acquire_shared_lock('k', 'A'), acquire_shared_lock('k', 'B')")
			if test.expired == "group" {
				d.expireGroup("k")
			} else {
				d.expireShare("k", "A")
			}
			other := d.begin(readCommitted)
			other.want(test.locked, "true")
			holder := d.connect()
			for release, want := range map[string]string{
				"release_shared_lock('k', 'A')":                        "false",
				"release_all_locks('A')":                               "0",
				"pgxlock_release_shares_batch('{k}', '{A}', '{null}')": "expired",
			} {
				holder.begin(level)
				if got := holder.outcome(release); got != want {
					t.Errorf("%s: %s: got %s, want %s", name, release, got, want)
				}
				holder.rollback()
			}
			other.rollback()
			d.do("delete from distributed_locks; delete from distributed_lock_shares")
		}
	})
}
