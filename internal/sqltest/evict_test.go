// Evictions: whose hold ends, what its holder can still do, and what is recorded.

package sqltest_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// evict is the call that takes a lease away.
func evict(lock, holder string, token int64) string {
	return fmt.Sprintf("evict_lock(%s, %s, %d, 'it is stuck')", quote(lock), quote(holder), token)
}

// evictions are those that are recorded.
const evictions = "select coalesce(string_agg(concat_ws(' ', kind, name, holder, token, reason), ', ' order by name, holder), '') from pgxlock_evictions"

func TestEvictionEndsThatHoldingAndNoOther(t *testing.T) {
	t.Parallel()
	d := install(t)
	token := d.token("k", "A")
	d.want("acquire_lock('other', 'A')", "true")
	for _, nobody := range []string{evict("k", "B", token), evict("k", "A", token+1), evict("free", "A", token)} {
		d.want(nobody, "false")
	}
	d.want(evictions, "")
	d.want("extend_lock('k', 'A')", "true")
	d.want(evict("k", "A", token), "true")
	d.want(evict("k", "A", token), "false")
	d.want(evictions, fmt.Sprintf("0 k A %d it is stuck", token))
	d.want("select evicted_by = session_user || ' (' || current_setting('application_name') || ')' or current_setting('application_name') = '' from pgxlock_evictions", "true")
	d.want("extend_lock('other', 'A')", "true")

	// The next holder has a greater token, and cannot be evicted by the old one.
	next := d.token("k", "A")
	if next <= token {
		t.Errorf("token %d after %d", next, token)
	}
	d.want(evict("k", "A", token), "false")
	d.want("extend_lock('k', 'A')", "true")
	d.want(fmt.Sprintf("(select string_agg(concat_ws(' ', n, reason, ms < 60000), ', ') from pgxlock_evicted('{0,0,1,0}', '{k,k,k,other}', '{A,A,A,A}', '{%d,%d,%[2]d,%[2]d}'))", next, token), "2 it is stuck t")
}

func TestEvictedHolderFindsTheLeaseGone(t *testing.T) {
	t.Parallel()
	d := install(t)
	for _, expired := range []bool{false, true} { // it may still be fenced
		token := d.token("k", "A")
		if expired {
			d.expire("k")
		}
		d.want(evict("k", "A", token), "true")
		d.want(fmt.Sprintf("renew_lock('k', 'A', %d) is null", token), "true")
		d.want("extend_lock('k', 'A')", "false")
		d.want(fmt.Sprintf("pgxlock_renew_batch('{k}', '{A}', '{%d}', '{60000}')", token), "gone")
		d.want(fmt.Sprintf("assert_lock_held('k', 'A', %d, true)", token), "LK001")
		d.want(fmt.Sprintf("pgxlock_release_batch('{k}', '{A}', '{%d}')", token), "g")
		d.want("release_lock('k', 'A')", "false")
		d.want("(select count(*) from pgxlock_holders('k'))", "0")
		d.want("reap_expired_locks('0 s')", "1")
	}
}

func TestPermitIsEvictedAsTheLeaseThatItIs(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.want("acquire_permit('jobs', 'A', 1)", "jobs#1")
	p := d.process()
	ticket := p.queue(0, "jobs#")
	d.want("evict_lock('jobs#1', 'A', (select fencing_token from pgxlock_holders('jobs#1')), 'why')", "true")
	d.want("select woken is not null from pgxlock_waiters where ticket = "+ticket, "true")
	d.want(fmt.Sprintf("(select permit from pgxlock_permit_batch('{jobs}', '{1}', '{B}', '{60000}', '{null}', '{%s}'))", ticket), "1")
}

func TestFirstWhoWaitsIsWokenByAnEviction(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	token := d.token("k", "A")
	p, behind := d.process(), d.process()
	first := p.queue(0, "k")
	behind.queue(0, "k")
	d.want(evict("k", "B", token), "false")
	d.want("select count(*) from pgxlock_waiters where woken is not null", "0")
	d.want(evict("k", "A", token), "true")
	d.want("select string_agg(ticket::text, ' ') from pgxlock_waiters where woken is not null", first)
	p.hears("0:k")
}

// A holder that writes in fenced transactions all the time is evicted all the same.
// What it has begun it may end, and until then nobody else has the lock.
func TestEvictionDoesNotWaitForFencedTransactionsAndNobodyPassesThem(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, shared := range []bool{false, true} {
			take, assert := "try_acquire_lock", "assert_lock_held"
			if shared {
				take, assert = "try_acquire_shared_lock", "assert_shared_lock_held"
			}
			token := d.number("(" + take + "('k', 'A')).fencing_token")
			writes := d.begin(level)
			writes.want(fmt.Sprintf("%s('k', 'A', %d, true)", assert, token), fmt.Sprint(token))
			d.want(evict("k", "A", token), "true")
			d.want(fmt.Sprintf("%s('k', 'A', %d, true)", assert, token), "LK001")
			d.want("acquire_lock('k', 'B')", "false")
			d.want("coalesce(acquire_shared_lock('k', 'B'), false)", "false")
			d.want("reap_expired_locks('0 s')", "0")
			writes.commit()
			if next := d.token("k", "B"); next <= token {
				t.Errorf("token %d after %d", next, token)
			}
			d.want("release_lock('k', 'B')", "true")
		}
	})
}

// The eviction of one share leaves the others as they are: the group lasts as long as
// they do, and an evicted one does not prolong it.
func TestEvictionEndsOneOfThoseThatShare(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.want("acquire_shared_lock('k', 'A', 600) and acquire_shared_lock('k', 'B', 60)", "true")
	token := d.number("(select fencing_token from distributed_locks)")
	d.want(evict("k", "C", token), "false")
	d.want(evict("k", "*shared", token), "22023")
	d.want(evict("k", "A", token), "true")
	d.want(evictions, fmt.Sprintf("0 k A %d it is stuck", token))
	d.wantShares("k", "B")
	d.want("select l.expires_at = s.expires_at from distributed_locks l, distributed_lock_shares s where s.holder_id = 'B'", "true")
	d.want("extend_shared_lock('k', 'A')", "false")
	d.want(fmt.Sprintf("pgxlock_renew_shares_batch('{k}', '{A}', '{%d}', '{60000}')", token), "gone")
	d.want(fmt.Sprintf("assert_shared_lock_held('k', 'A', %d, true)", token), "LK001")
	d.want("release_shared_lock('k', 'A')", "false")
	d.want("extend_shared_lock('k', 'B') and assert_shared_lock_held('k', 'B') > 0", "true")
	d.want("acquire_shared_lock('k', 'A')", "true") // it may come back, and is one more
	d.wantShares("k", "A", "B")
	d.want(evict("k", "B", token), "true")
	d.want("acquire_lock('k', 'W')", "false")
	d.want(evict("k", "A", token), "true")
	d.want("acquire_lock('k', 'W')", "true")
}

func TestEvictionSaysWhyAndIsRefusedOtherwise(t *testing.T) {
	t.Parallel()
	d := install(t)
	token := d.token("k", "A")
	for _, call := range []string{
		fmt.Sprintf("evict_lock(null, 'A', %d, 'why')", token), fmt.Sprintf("evict_lock('k', null, %d, 'why')", token), "evict_lock('k', 'A', null, 'why')",
		fmt.Sprintf("evict_lock('k', 'A', %d, null)", token), fmt.Sprintf("evict_lock('k', 'A', %d, '')", token), fmt.Sprintf("evict_lock('k', 'A', %d, repeat('y', 1001))", token),
		"evict_advisory_lock(null, 1, 'why')", "evict_advisory_lock(1, null, 'why')", "evict_advisory_lock(1, 1, 'why', 0)", "evict_advisory_lock(1, 1, 'why', null)", "evict_advisory_lock(1, 1, 'why', 1, repeat('k', 256))",
		"evict_advisory_lock(1, 1, 'why', 1, 'harmless')", "evict_advisory_lock(1, advisory_lock_key('k'), 'why', 2, 'k')", // the record would say so
		"evict_advisory_lock(1, advisory_lock_key('k'), 'why', 1, '@x/k')",
	} {
		d.want(call, "22023")
	}
	for _, level := range levels[1:] {
		for _, holder := range []string{"A", "B"} { // also where there would be nothing to do
			s := d.begin(level)
			s.want(evict("k", holder, token), "25001")
			s.done()
		}
	}
	d.want("extend_lock('k', 'A')", "true")
	d.want("evict_advisory_lock(1, advisory_lock_key('@x/k'), 'why', 1, '@x/k')", "false")
	d.want("evict_advisory_lock(1, advisory_lock_key_in('x', E'k/\\nl'), 'why', 1, E'@x/k/\\nl')", "false")
	d.want(evictions, "")

	// Who has its row locked by hand is not waited for for ever, and a row that is not
	// the holder's is not kept locked.
	other := d.begin(readCommitted)
	other.want(evict("k", "B", token), "false")
	d.do("begin; update distributed_locks set metadata = '1'; rollback")
	other.rollback()
	other.do("begin; update distributed_locks set metadata = '2'")
	d.want(evict("k", "A", token), "55P03")
	other.rollback()
}

func TestLastThousandEvictionsAreRemembered(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("insert into pgxlock_evictions select 0, 'k' || i, 'A', i, now() - interval '1 minute' * i, 'me', 'why' from generate_series(1, 1200) i")
	d.want(evict("k", "A", d.token("k", "A")), "true")
	d.want("select count(*) || ' ' || max(token) filter (where name <> 'k') from pgxlock_evictions", "1000 999")
}

// The session is asked: the one that has the key, in that space, in this database.
func TestSessionThatHasAnAdvisoryLockIsAskedForIt(t *testing.T) {
	t.Parallel()
	d := install(t)
	holder := d.connect()
	holder.do(fmt.Sprintf("listen pgxlock_holder_%d; select pg_advisory_lock(7), pg_advisory_lock_shared(0, 8)", holder.pid))
	for _, nobody := range []string{
		fmt.Sprintf("evict_advisory_lock(%d, 8, 'why')", holder.pid), fmt.Sprintf("evict_advisory_lock(%d, 7, 'why', 2)", holder.pid), fmt.Sprintf("evict_advisory_lock(%d, 7, 'why')", d.pid),
	} {
		d.want(nobody, "false")
	}
	d.want(evictions, "")
	told := func() (payloads string) {
		holder.do("select 1")
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // what is there is returned all the same
		for {
			n, err := holder.conn.WaitForNotification(ctx)
			if err != nil {
				return strings.TrimSpace(payloads)
			}
			payloads += " " + n.Payload
		}
	}
	if got := told(); got != "" {
		t.Errorf("it was told %q", got)
	}
	d.want(fmt.Sprintf("evict_advisory_lock(%d, 7, 'why')", holder.pid), "true")
	d.want(fmt.Sprintf("evict_advisory_lock(%d, 7, 'why else')", holder.pid), "true") // the last word counts
	d.want(fmt.Sprintf("evict_advisory_lock(%d, 8, 'why', 2)", holder.pid), "true")
	d.want(evictions, fmt.Sprintf("1 7 advisory:%d:1:7 0 why else, 2 8 advisory:%[1]d:2:8 0 why", holder.pid))
	if got := told(); got != "1:evict 1:evict 1:evict" {
		t.Errorf("it was told %q", got)
	}
	holder.do("select pg_advisory_unlock(7)")
	d.want(fmt.Sprintf("evict_advisory_lock(%d, 7, 'why')", holder.pid), "false")
}

func TestNamesArePublishedUnderTheirKeysAndForgottenAfterAnHour(t *testing.T) {
	t.Parallel()
	d := install(t)
	names := "select string_agg(name, ' ' order by name) from pgxlock_names where key_id = advisory_lock_key(name) and held_at > now() - interval '1 minute'"
	d.do("select pgxlock_publish_names('{a,b,a}'), pgxlock_publish_names('{}')")
	d.want(names, "a b")
	d.do("update pgxlock_names set held_at = now() - interval '59 minutes'; insert into pgxlock_names select i, 'old', now() - interval '61 minutes' from generate_series(1, 2100) i")
	d.do("select pgxlock_publish_names('{b,c}')")
	d.want(names, "b c")
	d.want("select count(*) from pgxlock_names where name = 'a'", "1")
	d.want("select count(*) from pgxlock_names where name = 'old'", "100") // in steps
	d.do("select pgxlock_publish_names('{b}')")
	d.want("select string_agg(name, ' ' order by name) from pgxlock_names", "a b c")
	for _, bad := range []string{"null", "'{null}'", `'{""}'`, "array[repeat('n', 256)]", "array_fill('n'::text, array[1001])"} {
		d.want("pgxlock_publish_names("+bad+")", "22023")
	}
}

// As TestHousekeepingOfLimitsLocksRowsInTheOrderOfTheirKeys.
func TestDeadInQueuesAreRemovedInTheOrderOfTheirKeys(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do(`insert into pgxlock_waiters (kind, name, ticket, owner, waiters, since, live_until)
		select 0, n, t, '', 1, now(), '-infinity' from unnest('{c,a,b}'::text[], '{1,3,2}'::int[]) v (n, t);
		create sequence stops;
		create function stop() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock(nextval('public.stops')); return old; end $$;
		create trigger stop before delete on pgxlock_waiters for each row execute function stop()`)
	stops, remover := d.sessions()
	stops.do("select pg_advisory_lock(i) from generate_series(1, 3) i")
	removing := remover.start("pgxlock_remove_dead('{0,0,0}', '{c,b,a}', '{9,9,9}')")
	for i := 1; i <= 3; i++ {
		await(t, d, fmt.Sprintf("exists (select from pg_locks where pid = %d and locktype = 'advisory' and not granted and objid = %d)", remover.pid, i))
		locked := d.get(`with free as materialized (select name from pgxlock_waiters for update skip locked)
			select string_agg(name, '' order by name) from pgxlock_waiters where name not in (select name from free)`)
		if !strings.HasPrefix("abc", locked) || len(locked) < i {
			t.Errorf("when it removes its row number %d it has locked %s", i, locked)
		}
		stops.want(fmt.Sprintf("pg_advisory_unlock(%d)", i), "true")
	}
	removing.want("")
}
