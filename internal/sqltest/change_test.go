package sqltest_test

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// changeCalls are a lease and a share of A, and what renews them.
var changeCalls = map[string]struct {
	shared                    bool
	acquire, rows, renew, end string
}{
	"lease": {false, "acquire_lock('k', 'A')", "distributed_locks", "pgxlock_renew_batch('{k}', '{A}', '{%d}', '{%d}')", "release_lock('k', 'A')"},
	"share": {true, "acquire_shared_lock('k', 'A')", "distributed_lock_shares", "pgxlock_renew_shares_batch('{k}', '{A}', '{%d}', '{%d}')", "release_shared_lock('k', 'A')"},
}

// A Locker sends a change, gets no answer, and renews the lease over another connection. Then the change
// arrives.
func TestChangeThatArrivesLateChangesNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for name, c := range changeCalls {
		d.want(c.acquire, "true")
		token := d.number("select fencing_token from " + c.rows)
		change := func(version, metadata string, ttl int) string {
			return fmt.Sprintf("(pgxlock_change_lease('k', 'A', %d, %t, %s, %d, %s)).", token, c.shared, version, ttl*1000, metadata)
		}
		version := func() string { return quote(d.get(change("null", "null", 1) + "version")) }
		lasts := func(seconds int) {
			t.Helper()
			for _, rows := range []string{c.rows, "distributed_locks"} { // the group lasts as long as its longest share
				d.want(fmt.Sprintf("select expires_at - clock_timestamp() between interval '%d s' and interval '%d s' from %s", seconds-60, seconds, rows), "true")
			}
		}
		renew := func(ttl int) string { return fmt.Sprintf(c.renew, token, ttl*1000) }

		first := version()
		d.want(change("null", `'"late"'`, 600)+"outcome", "skipped") // it only asks
		d.want(change(first, `'"now"'`, 600)+"outcome", "renewed")
		lasts(600)
		d.want("select metadata from "+c.rows, `"now"`)
		d.want(change(first, `'"late"'`, 300)+"outcome", "skipped")

		late := version()
		d.want(renew(300), "renewed") // no shorter than it is
		lasts(600)
		d.want(change(late, `'"late"'`, 300)+"outcome", "skipped")
		lasts(600)
		d.want("select metadata from "+c.rows, `"now"`)
		d.want(change(version(), "null", 300)+"outcome", "renewed")
		lasts(300)
		d.want("select metadata from "+c.rows, `"now"`)
		d.want(renew(600), "renewed")
		lasts(600)

		other := d.begin(readCommitted)
		other.do("select from distributed_locks for update")
		d.want(change(version(), "null", 300)+"outcome", "skipped")
		other.rollback()
		other.done()
		for _, wrong := range []string{
			fmt.Sprintf("pgxlock_change_lease('k', 'A', %d, %t, null, 0, null)", token, c.shared),
			fmt.Sprintf("pgxlock_change_lease('k', '*shared', %d, false, null, 1000, null)", token),
			fmt.Sprintf("pgxlock_change_lease('k', 'A', %d, %t, null, 1000, to_jsonb(repeat('m', 70000))::text)", token, c.shared),
		} {
			d.want(wrong, "22023")
		}
		d.want(fmt.Sprintf("(pgxlock_change_lease('k', 'A', %d, %t, null, 1000, null)).outcome", token+1, c.shared), "gone")
		d.want(fmt.Sprintf("(pgxlock_change_lease('k', 'B', %d, %t, null, 1000, null)).outcome", token, c.shared), "gone")
		last := version()
		d.do("update " + c.rows + " set expires_at = clock_timestamp() - interval '1 s' where holder_id = 'A'")
		d.want(change(last, "null", 600)+"outcome", "gone")
		d.want(c.end, "false")
		if t.Failed() {
			t.Fatal(name)
		}
		d.do("delete from distributed_locks; delete from distributed_lock_shares")
	}
}

// A share that becomes shorter keeps the others of its group.
func TestChangeOfAShareKeepsTheOthersOfItsGroup(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_shared_lock('k', 'A', 600), acquire_shared_lock('k', 'B', 300)")
	token := d.number("select fencing_token from distributed_locks")
	change := fmt.Sprintf("(pgxlock_change_lease('k', 'A', %d, true, (select xmin::text from distributed_lock_shares where holder_id = 'A'), 60000, null)).outcome", token)
	d.want(change, "renewed")
	d.want("select l.expires_at = s.expires_at from distributed_locks l, distributed_lock_shares s where s.holder_id = 'B'", "true")
	d.begin(readCommitted).want("assert_shared_lock_held('k', 'A') > 0", "true") // a fence is in no change's way
	d.want(change, "renewed")
}

func TestLeaseBecomesAShareWithoutAGap(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	share := func(token int64) string { return fmt.Sprintf("pgxlock_share_held('k', 'A', %d, 'B', 60000)", token) }
	d.want("acquire_lock('k', 'A', 600, '{\"why\": 1}')", "true")
	token := d.number("select fencing_token from distributed_locks")

	// A transaction that asserted the lease may write as if it were alone.
	writer := d.begin(readCommitted)
	writer.want("assert_lock_held('k', 'A') > 0", "true")
	d.want(share(token), "skipped")
	writer.commit()
	d.want(share(token+1), "gone")
	renewing := d.begin(readCommitted)
	renewing.want("extend_lock('k', 'A')", "true")
	d.want(share(token), "skipped")
	renewing.rollback()

	old := d.begin("repeatable read") // a snapshot in which A is alone
	old.want("(select count(*) from distributed_locks)", "1")

	// Until it commits, others see the exclusive lease, and from then on the group.
	other := d.begin(readCommitted)
	other.want(share(token), "shared")
	d.want("acquire_lock('k', 'C')", "false")
	d.want("acquire_shared_lock('k', 'C')", "false")
	other.commit()
	d.want("acquire_lock('k', 'C')", "false")
	d.want("acquire_shared_lock('k', 'C')", "true")
	d.want("select string_agg(concat_ws(' ', holder_id, fencing_token = (select fencing_token from distributed_locks), metadata), ',' order by holder_id) from distributed_lock_shares", `B t {"why": 1},C t {}`)
	d.want(share(token), "shared") // once more, because the answer was lost
	d.want("assert_shared_lock_held('k', 'B') = "+fmt.Sprint(token), "true")
	writer.begin(readCommitted)
	writer.want("assert_lock_held('k', 'A')", "LK001")
	writer.rollback()
	old.want("assert_lock_held('k', 'A')", "40001")
	old.rollback()
	d.want("release_shared_lock('k', 'B')", "true")
	d.want(share(token), "gone")
	d.want("release_shared_lock('k', 'C')", "true")
	d.want("acquire_lock('k', 'D')", "true")
	d.want(fmt.Sprintf("pgxlock_share_held('k', 'D', %d, '*shared', 60000)", token), "22023")
	d.want(fmt.Sprintf("pgxlock_share_held('k', 'D', %d, 'B', 0)", token), "22023")
}
