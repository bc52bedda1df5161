// Rate limits: what is granted when, by whose clock, and what is locked meanwhile.

package sqltest_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// limitBatch is a batch of one event each, of a limit of one in that many
// nanoseconds.
func limitBatch(step int64, burst int, keys ...string) string {
	return fmt.Sprintf("pgxlock_limit_batch(%d, %d, '{%s}', array_fill(1, array[%d]), array_fill(0, array[%[4]d]), array_fill(null::integer, array[%[4]d]))",
		step, burst, strings.Join(keys, ","), len(keys))
}

const hour = 3600_000_000_000

func TestEntriesOfABatchAreDecidedInTheirOrder(t *testing.T) {
	t.Parallel()
	d := install(t)
	for _, test := range []struct{ keys, counts, waits, want string }{
		{"a,a,a,a", "1,1,1,1", "0,0,0,0", "t t t f"},
		{"b,a1,b,b,b", "2,1,2,1,1", "0,0,0,0,0", "t t f t f"},
		{"c,c,c,c", "3,1,3,1", "0,7200000000000,3600000000000,3600000000000", "t t f f"},
		{"c2,c2,c2", "3,3,1", "0,7200000000000,3600000000000", "t f t"},
	} {
		got := d.get(fmt.Sprintf(`select string_agg(left(d.granted::text, 1), ' ' order by d.n)
			from pgxlock_limit_batch(%d, 3, '{%s}', '{%s}', '{%s}', array_fill(null::integer, array[%d])) with ordinality as d (granted, delay, tat, n)`,
			int64(hour), test.keys, test.counts, test.waits, strings.Count(test.keys, ",")+1))
		if got != test.want {
			t.Errorf("%+v: %s", test, got)
		}
	}
}

// The answers are compared with what they must be by the clock of the server before
// and after each call. Nothing is rounded but the time of one event.
func TestSoakLimitsAreExactToTheNanosecond(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do(`create table told (n bigint generated always as identity, before bigint, tat bigint, granted boolean, now_tat bigint, delay bigint, cost bigint, spare bigint, later bigint);
		create procedure try(p_key text, p_step bigint, p_burst integer, p_count integer, p_wait bigint) language plpgsql as $$
		declare v_before bigint; v_tat bigint := coalesce((select q.tat from pgxlock_limits q where q.limit_key = p_key), 0); r record; v_later bigint;
		begin
			v_before := pgxlock_limit_clock();
			select * into r from pgxlock_limit_batch(p_step, p_burst, array[p_key], array[p_count], array[p_wait], '{null}');
			v_later := pgxlock_limit_clock();
			insert into told (before, tat, granted, now_tat, delay, cost, spare, later)
				values (v_before, v_tat, r.granted, r.tat, r.delay, p_count * p_step, p_burst * p_step - p_count * p_step + p_wait, v_later);
			if coalesce((select q.tat from pgxlock_limits q where q.limit_key = p_key), 0) <> (case when r.granted then r.tat else v_tat end) then
				raise exception 'the table does not say what was answered';
			end if;
		end $$`)
	rounds := pgtest.Soak(t, 10, 300)
	for round := range rounds {
		step := []int64{1000, 1429, 33_333, 1_000_000, 2592000_000_000_000}[round%5]
		burst := 1 + rand.N(1000)
		d.do(fmt.Sprintf(`do $$ begin for i in 1..100 loop
			call try('k%d', %d, %[3]d, (1 + random() * (%[3]d - 1))::integer, (random() * 2 * %[2]d)::bigint); commit; end loop; end $$`, rand.N(5), step, burst))
	}
	for what, wrong := range map[string]string{
		"granted too early":          "granted and greatest(tat, before) - later > spare",
		"refused too late":           "not granted and greatest(tat, later) - before <= spare",
		"counted wrongly":            "granted and not now_tat - cost between greatest(tat, before) and greatest(tat, later)",
		"a refusal counted":          "not granted and not now_tat between greatest(tat, before) and greatest(tat, later)",
		"nothing was granted":        "not exists (select from told where granted)",
		"nothing was refused":        "not exists (select from told where not granted)",
		"a refusal's delay is short": "not granted and delay <= 0",
	} {
		if n := d.number("select count(*) from told where " + wrong); n != 0 {
			t.Errorf("%s: %d times, as %s", what, n, d.get("select told from told where "+wrong+" limit 1"))
		}
	}
}

func TestRefusedRequestsWriteAndLockNothing(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.do("select allow_rate('k', 0.001, 1)")
	before := d.get("select (ctid, xmin, xmax, tat) from pgxlock_limits")
	s, other := d.sessions()
	s.do("begin")
	for _, call := range []string{
		"allow_rate('k', 0.001, 1)", "(select granted from reserve_rate('k', 0.001, 1, 1, '1 minute'))",
		"(select granted from " + limitBatch(hour, 1, "k") + ")",
	} {
		s.want(call, "false")
	}
	s.want("pg_current_xact_id_if_assigned()", "NULL")
	if got := d.get("select (ctid, xmin, xmax, tat) from pgxlock_limits"); got != before {
		t.Errorf("%s, was %s", got, before)
	}
	other.want("(select granted from reserve_rate('k', 0.001, 1))", "true")
	s.rollback()
}

// Both saw that there was enough for one; the second finds out with the row locked.
func TestRefusalThatWaitedKeepsNoRowLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select allow_rate('k', 0.001, 2)")
	a, b := d.sessions()
	a.do("begin")
	b.do("begin")
	a.want("allow_rate('k', 0.001, 2)", "true")
	late := b.start("allow_rate('k', 0.001, 2)")
	late.waitsFor(a)
	a.commit()
	late.want("false")
	d.want("(select granted from reserve_rate('k', 0.001, 2))", "true") // while b's transaction is open
	b.rollback()
}

// What passes while a row is waited for counts, for both sides: a burst is not allowed
// on top of what had come together when the wait began.
func TestWaitForTheRowIsNotDecidedByAnOldClock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, key := range []string{"there", "made just now"} {
		a, b := d.sessions()
		d.do("select allow_rate('there', 1000, 1)")
		await(t, d, "(select tat < pgxlock_limit_clock() from pgxlock_limits where limit_key = 'there')")
		a.do("begin; insert into pgxlock_limits values (" + quote(key) + ", 0) on conflict (limit_key) do update set tat = excluded.tat")
		late := b.start("(select tat from " + limitBatch(1000, 1, quote(key)[1:len(key)+1]) + ")")
		late.waitsFor(a)
		free := a.number("pgxlock_limit_clock()")
		if key == "there" {
			a.rollback()
		} else {
			a.commit()
		}
		var tat int64
		if _, err := fmt.Sscan(late.outcome(), &tat); err != nil {
			t.Fatal(err)
		}
		if tat-1000 < free {
			t.Errorf("%s: it was decided by the time %d, and locked at %d", key, tat-1000, free)
		}
	}
}

// A caller's transaction keeps what it was granted locked, and gives it back with a
// rollback, also to a savepoint.
func TestRollbackGivesBack(t *testing.T) {
	t.Parallel()
	d := install(t)
	a, b := d.sessions()
	a.do("begin; savepoint s")
	a.want("allow_rate('k', 0.001, 1)", "true")
	a.want("allow_rate('k', 0.001, 1)", "false")
	waits := b.start("allow_rate('k', 0.001, 1)")
	waits.waitsFor(a)
	a.do("rollback to s")
	a.want("allow_rate('k', 0.001, 1)", "true")
	a.rollback()
	waits.want("true")
	b.do("set lock_timeout = '10ms'")
	a.do("begin; select from pgxlock_limits for update")
	b.want("(select granted from reserve_rate('k', 0.001, 1))", "55P03")
	a.rollback()
}

func TestLimitsAreCountedInReadCommitted(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select allow_rate('used', 0.001, 1)")
	for _, level := range levels {
		for _, key := range []string{"new " + level, "used"} {
			s := d.begin(level)
			want := "25001"
			if level == readCommitted || level == "read uncommitted" {
				want = fmt.Sprint(key != "used")
			}
			s.want("allow_rate("+quote(key)+", 0.001, 1)", want)
			s.done()
		}
	}
	s := d.connect()
	s.do("begin read only")
	s.want("allow_rate('used', 0.001, 1)", "false")
	s.want("allow_rate('new', 0.001, 1)", "25006")
	s.rollback()
}

func TestNonsenseIsRefusedByLimits(t *testing.T) {
	t.Parallel()
	d := install(t)
	for _, call := range []string{
		"allow_rate(null, 1, 1)", "allow_rate('', 1, 1)", "allow_rate(repeat('k', 256), 1, 1)", "allow_rate('k', null, 1)", "allow_rate('k', 0, 1)",
		"allow_rate('k', -1, 1)", "allow_rate('k', 1000001, 1)", "allow_rate('k', 'nan', 1)", "allow_rate('k', 'infinity', 1)", "allow_rate('k', '-infinity', 1)",
		"allow_rate('k', 1e-10, 1)", "allow_rate('k', 1, null)", "allow_rate('k', 1, 0)", "allow_rate('k', 1, -1)", "allow_rate('k', 1e-8, 2000)",
		"allow_rate('k', 1, 1, null)", "allow_rate('k', 1, 1, 0)", "allow_rate('k', 1, 1, 2)", "(reserve_rate('k', 1, 1, 1, '-1 us')).granted",
		"(reserve_rate('k', 1, 1, 1, '101 years')).granted",
		// As intervals compare these are 0.
		"(reserve_rate('k', 1, 1, 1, '1000000 years -360000000 days')).granted", "(reserve_rate('k', 1, 1, 1, '-1200 months 36000 days')).granted",
		"(select granted from pgxlock_limit_batch(999, 1, '{k}', '{1}', '{0}', '{null}'))", "(select granted from pgxlock_limit_batch(0, 1, '{k}', '{1}', '{0}', '{null}'))",
		"(select granted from pgxlock_limit_batch(null, 1, '{k}', '{1}', '{0}', '{null}'))", "(select granted from pgxlock_limit_batch(1000, 1, '{k,k}', '{1}', '{0}', '{null}'))",
		"(select granted from pgxlock_limit_batch(1000, 1, '{k}', '{2}', '{0}', '{null}'))", "(select granted from pgxlock_limit_batch(1000, 1, '{k}', '{1}', '{-1}', '{null}'))",
		"(select granted from pgxlock_limit_batch(1000, 1, null, '{1}', '{0}', '{null}'))", "(select granted from pgxlock_limit_batch(1000, 1, '{null}', '{1}', '{0}', '{null}'))",
		"(select removed from pgxlock_reap_limits(null))", "(select removed from pgxlock_reap_limits(0, 0))", "(select removed from pgxlock_reap_limits(0, 10001))",
	} {
		d.want(call, "22023")
	}
	d.want("(select count(*) from pgxlock_limits)", "0")
	d.want("allow_rate('k', 1e-9, 1)", "true")
	d.want("allow_rate('k', 1000000, 2147483647, 2147483647)", "false") // it waits for the other
	d.want("(reserve_rate('k', 1e-9, 3, 3)).granted", "true")
	d.want("(reserve_rate('k', 1e-9, 3, 3)).granted", "false") // that would be in more than 100 years
	d.want("(select count(*) from "+limitBatch(1000, 1)+")", "0")
}

// Batches name the same keys in different orders, and those who take the idle ones away
// find them in a third.
func TestSoakBatchesOfLimitsDoNotDeadlock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	rounds := pgtest.Soak(t, 40, 3000)
	var all sync.WaitGroup
	for range 4 {
		s := d.connect()
		all.Go(func() {
			for range rounds {
				keys := rand.Perm(8)
				var names []string
				for _, k := range keys[:4] {
					names = append(names, fmt.Sprint("k", k))
				}
				if got := s.outcome("(select bool_and(granted) from " + limitBatch(1000, 1000000, names...) + ")"); got != "true" {
					t.Errorf("%v: %s", names, got)
					return
				}
			}
		})
	}
	for range 2 {
		reaper := d.connect()
		all.Go(func() {
			for range rounds {
				for _, call := range []string{"delete from pgxlock_limits where limit_key = 'k1'", "select pgxlock_reap_limits()"} {
					if err := reaper.run(call); err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	all.Wait()
}

// SKIP LOCKED waits for a row whose new version somebody locks at the wrong moment, which
// no test can bring about. So a session that has some of the rows must have the first of them.
func TestHousekeepingOfLimitsLocksRowsInTheOrderOfTheirKeys(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do(`insert into pgxlock_limits values ('c', 0), ('a', 0), ('d', 0), ('b', 0);
		create sequence stops;
		create function stop() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock(nextval('public.stops')); return old; end $$;
		create trigger stop before delete on pgxlock_limits for each row execute function stop()`)
	stops, reaper := d.sessions()
	stops.do("select pg_advisory_lock(i) from generate_series(1, 4) i")
	reaping := reaper.start("(select removed from pgxlock_reap_limits())")
	for i := 1; i <= 4; i++ {
		await(t, d, fmt.Sprintf("exists (select from pg_locks where pid = %d and locktype = 'advisory' and not granted and objid = %d)", reaper.pid, i))
		locked := d.get(`with free as materialized (select limit_key from pgxlock_limits for update skip locked)
			select string_agg(limit_key, '' order by limit_key) from pgxlock_limits where limit_key not in (select limit_key from free)`)
		if !strings.HasPrefix("abcd", locked) || len(locked) < i {
			t.Errorf("when it removes its row number %d it has locked %s", i, locked)
		}
		stops.want(fmt.Sprintf("pg_advisory_unlock(%d)", i), "true")
	}
	reaping.want("4")
}

// Where a table is as large as it gets, what is used in it is looked up.
func TestHousekeepingOfLimitsGoesThroughTheTableInSteps(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("insert into pgxlock_limits select 'idle ' || i, 0 from generate_series(1, 3000) i; insert into pgxlock_limits values ('used', pgxlock_limit_clock() + 1000000000000)")
	var removed int64
	page, steps := "0", 0
	for ; page != "NULL"; steps++ {
		rows, err := d.conn.Query(t.Context(), "select removed, coalesce(next_page::text, 'NULL') from pgxlock_reap_limits("+page+", 5)")
		if err != nil {
			t.Fatal(err)
		}
		step, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[struct {
			Removed int64
			Next    string
		}])
		if err != nil {
			t.Fatal(err)
		}
		if step.Removed > 1000 {
			t.Errorf("%d rows at a time", step.Removed)
		}
		removed += step.Removed
		page = step.Next
	}
	if removed != 3000 || steps < 5 {
		t.Errorf("%d rows in %d steps", removed, steps)
	}
	d.want("(select string_agg(limit_key, ' ') from pgxlock_limits)", "used")
	if plan := d.get("(select count(*) from pg_class where relname = 'pgxlock_limits' and reloptions @> '{fillfactor=50}')"); plan != "1" {
		t.Error("there is no room on the pages for updates")
	}
}

// A row is changed without a change of an index.
func TestBucketThatIsTakenOftenStaysOnItsPage(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("insert into pgxlock_limits select 'k' || i, 0 from generate_series(1, 100) i")
	d.do("do $$ begin for i in 1..1000 loop perform allow_rate('k1', 1000000, 100000); commit; end loop; end $$")
	d.do("select pg_stat_force_next_flush()")
	await(t, d, "(select n_tup_upd >= 1000 from pg_stat_user_tables where relname = 'pgxlock_limits')")
	d.want("(select n_tup_hot_upd >= n_tup_upd * 0.95 from pg_stat_user_tables where relname = 'pgxlock_limits')", "true")
}
