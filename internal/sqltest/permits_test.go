// Permits: which one is taken, by which holder, and what a refused caller is told.

package sqltest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// takePermit is take for one of so many permits: granted with its number, or refused as
// there.
func takePermit(name, holder string, n int, ticket string) string {
	return fmt.Sprintf("select concat_ws(' ', acquired, ahead, held_by, permit) from pgxlock_permit_batch(array[%s], '{%d}', array[%s], '{60000}', '{NULL}', array[%s]::bigint[])",
		quote(name), n, quote(holder), ticket)
}

// grantedPermit is what takePermit answers then.
func grantedPermit(n int) string { return fmt.Sprintf("t f %d", n) }

func TestFreePermitOfManyIsFound(t *testing.T) {
	t.Parallel()
	d := install(t)
	const n = 60
	d.want(fmt.Sprintf("select count(acquire_permit('jobs', 'all', %d, 600)) from generate_series(1, %[1]d)", n), fmt.Sprint(n))
	d.want("select count(distinct lock_name) from distributed_locks", fmt.Sprint(n))
	mine := fmt.Sprintf("acquire_permit('jobs', 'me', %d)", n)
	d.want(mine, "NULL")
	for _, free := range []string{"jobs#1", "jobs#37", fmt.Sprint("jobs#", n)} {
		d.want("release_lock("+quote(free)+", 'all')", "true")
		d.want(mine, free)
		d.want(mine, "NULL")
		d.expire(free)
		d.want(mine, free)
		d.want(mine, "NULL")
	}
	// A caller that says n cannot use the (n+1)-th.
	d.want(fmt.Sprintf("acquire_permit('jobs', 'more', %d, 1, '{\"why\": 1}')", n+1), fmt.Sprint("jobs#", n+1))
	d.want(fmt.Sprintf("select metadata from distributed_locks where lock_name = 'jobs#%d'", n+1), `{"why": 1}`)
	d.expire(fmt.Sprint("jobs#", n+1))
	d.want(mine, "NULL")
}

// Others take permits in transactions that are still open, so that they look free.
func TestLoserOfARaceForAPermitTakesAnotherOne(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	other := d.begin(readCommitted)
	for i := range 3 {
		other.want(fmt.Sprintf("acquire_lock('jobs#%d', 'other')", i+1), "true")
	}
	for range 15 {
		d.want("acquire_permit('jobs', 'me', 4)", "jobs#4")
		d.want("release_lock('jobs#4', 'me')", "true")
	}
	other.want("acquire_lock('jobs#4', 'other')", "true")
	d.want("acquire_permit('jobs', 'me', 4)", "NULL")
	other.rollback()
}

// Each begins to look somewhere else.
func TestThoseWhoComeTogetherDoNotAllTryTheSamePermit(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.want("select count(acquire_permit('jobs', 'me', 10000)) from generate_series(1, 5)", "5")
	d.want("select max(split_part(lock_name, '#', 2)::int) > 5 from distributed_locks", "true")
}

func TestFirstWaiterTakesTheNextPermit(t *testing.T) {
	t.Parallel()
	d := install(t)
	const queue = "jobs#"
	first, second := d.process(), d.process()
	a, b := first.queue(0, queue), second.queue(0, queue)
	second.want(takePermit("jobs", "B", 1, b), stepBack)
	d.want(takePermit("jobs", "new", 1, "0"), stepBack)
	d.want(takePermit("jobs", "barges", 1, "NULL"), grantedPermit(1))
	first.want(takePermit("jobs", "A", 1, a), busy("barges"))
	d.queueIs(0, queue, a, b)
	d.want("release_lock('jobs#1', 'barges')", "true")
	first.want(takePermit("jobs", "A", 2, a), grantedPermit(1)+"|"+grantedPermit(2))
	d.queueIs(0, queue, b)
	second.want(takePermit("jobs", "B", 2, b), grantedPermit(1)+"|"+grantedPermit(2))
	d.queueIs(0, queue)
	d.want(takePermit("jobs", "new", 2, "0"), "f f A|f f B")

	// Those in one batch as well, each in its own queue.
	a, b = first.queue(0, queue), second.queue(0, "mails#")
	d.want(fmt.Sprintf("select string_agg(concat_ws(' ', acquired, ahead, permit), ',') from pgxlock_permit_batch('{jobs,mails}', '{3,1}', '{C,D}', '{60000,60000}', '{NULL,NULL}', '{0,%s}')", b),
		"f t,t f 1")
	d.queueIs(0, queue, a)
	d.queueIs(0, "mails#")
}

// takePermits is takePermit for several together.
func takePermits(name, holder string, n, wanted int) string {
	return fmt.Sprintf("select count(distinct permit) || ' ' || bool_or(acquired) from pgxlock_permit_batch(array[%s], '{%d}', array[%s], '{60000}', '{NULL}', '{0}', '{%d}')",
		quote(name), n, quote(holder), wanted)
}

func TestPermitsThatAreWantedTogetherAreAcquiredAllOrNone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.want(takePermits("jobs", "A", 8, 3), "3 true")
	d.want(takePermits("jobs", "A", 8, 3), "3 true")
	d.want("select count(*) from distributed_locks where holder_id = 'A' and lock_name like 'jobs#%'", "6")
	d.want(takePermits("jobs", "B", 8, 3), "0 false")
	d.want("select count(*) from distributed_locks", "6")

	// Two look free, and are being acquired by a transaction that is still open.
	other := d.begin(readCommitted)
	free := d.get("select string_agg(format('acquire_lock(%L, %L)', 'jobs#' || n, 'other'), ' and ') from generate_series(1, 8) n where not exists (select from distributed_locks where lock_name = 'jobs#' || n)")
	other.want(free, "true")
	d.want(takePermits("jobs", "B", 9, 3), "0 false")
	d.want("select count(*) from distributed_locks", "6")
	d.want(takePermits("jobs", "B", 10, 2), "2 true")
	other.rollback()
	d.want(takePermits("jobs", "C", 10, 2), "2 true")
	d.want(takePermits("jobs", "D", 10, 1), "0 false")

	// An expired one is free, and those behind a larger request are not served before it.
	d.do("update distributed_locks set expires_at = clock_timestamp() - interval '1 s' where holder_id = 'C'")
	process := d.process()
	process.queue(0, "jobs#")
	d.want(takePermits("jobs", "D", 10, 2), "0 false")
	d.do("delete from pgxlock_waiters")
	d.want(takePermits("jobs", "D", 10, 2), "2 true")
	for _, wanted := range []string{"{0}", "{11}", "{null}", "{1,1}", "{}"} {
		d.want("(select count(*) from pgxlock_permit_batch('{jobs}', '{10}', '{A}', '{60000}', '{NULL}', '{0}', '"+wanted+"'))", "22023")
	}
	d.want("(select count(*) from pgxlock_permit_batch('{a,b}', '{600,600}', '{A,A}', '{60000,60000}', '{NULL,NULL}', '{0,0}', '{500,501}'))", "22023")
}

func TestDeadOrSleepingWaiterKeepsNoOtherFromAPermit(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	const queue = "jobs#"
	dead, sleeper, live := d.process(), d.process(), d.process()
	dead.queue(0, queue)
	s := sleeper.queue(0, queue)
	l := live.queue(0, queue)
	dead.die()
	live.want(takePermit("jobs", "L", 1, l), stepBack)
	d.queueIs(0, queue, s, l) // the dead ticket is removed
	d.want(wake(0, queue, "NULL"), "1 "+s)
	d.keep(s)
	live.want(takePermit("jobs", "L", 1, l), stepBack) // it is woken, and its turn is not over
	d.pass(s)
	live.want(takePermit("jobs", "L", 1, l), grantedPermit(1))
	d.queueIs(0, queue, s)

	// A caller that is refused shows that it lives.
	d.want(fmt.Sprintf("select woken is not null from pgxlock_waiters where ticket = %s", s), "true")
	sleeper.want(takePermit("jobs", "S", 1, s), busy("L"))
	d.want(fmt.Sprintf("select woken is null from pgxlock_waiters where ticket = %s", s), "true")
	d.queueIs(0, queue, s)
}

func TestRefusalOfAPermitNamesTheHolderWhoseEndsFirst(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for i, holder := range []string{"late", "soon", "later", "beyond"} {
		d.want(fmt.Sprintf("acquire_lock('jobs#%d', '%s', %d)", i+1, holder, []int{600, 60, 900, 6}[i]), "true")
	}
	d.want(takePermit("jobs", "me", 3, "NULL"), busy("soon"))
	d.want("select remaining_ms between 1 and 60000 from pgxlock_permit_batch('{jobs}', '{3}', '{me}', '{60000}', '{NULL}', '{NULL}')", "true")
	d.expire("jobs#2") // and is being taken over
	other := d.begin(readCommitted)
	other.want("acquire_lock('jobs#2', 'other')", "true")
	d.want(takePermit("jobs", "me", 3, "NULL"), busy("late"))
	other.rollback()
}

// Nothing is decided by it.
func TestCallersLearnOfOtherNumbersOfPermits(t *testing.T) {
	t.Parallel()
	d := install(t)
	others := func(n int, want string) {
		t.Helper()
		d.want(fmt.Sprintf("select others from pgxlock_permit_batch('{jobs}', '{%d}', '{me}', '{60000}', '{NULL}', '{NULL}')", n), want)
	}
	age := func(n int, age string) {
		t.Helper()
		d.do(fmt.Sprintf("update pgxlock_semaphores set used_at = clock_timestamp() - interval '%s' where permits = %d", age, n))
	}
	others(2, "NULL")
	others(2, "NULL")
	others(5, "2")
	others(3, "5")
	others(2, "5")
	age(5, "61 seconds")
	others(2, "3")
	age(3, "61 seconds")
	others(2, "NULL")
	others(5, "2")
	others(2, "5")

	// It is written now and then, and so are those removed whom nobody uses any more.
	written := "select xmin from pgxlock_semaphores where permits = 2"
	was := d.get(written)
	age(3, "25 hours")
	others(2, "5")
	d.want(written, was)
	d.want("select string_agg(permits::text, ' ' order by permits) from pgxlock_semaphores", "2 3 5")
	age(2, "21 seconds")
	others(2, "5")
	d.want("select used_at > clock_timestamp() - interval '20 seconds' from pgxlock_semaphores where permits = 2", "true")
	d.want("select string_agg(permits::text, ' ' order by permits) from pgxlock_semaphores", "2 5")

	// For which nobody waits.
	open := d.begin(readCommitted)
	open.want("acquire_permit('mails', 'open', 2) is not null", "true")
	d.want("acquire_permit('mails', 'me', 2) is not null", "true")
	open.rollback()
}

func TestBadInputOfPermitsIsNamed(t *testing.T) {
	t.Parallel()
	d := install(t)
	batch := func(name, permits, holder, ticket string) string {
		return fmt.Sprintf("(select permit from pgxlock_permit_batch(array[%s]::text[], array[%s]::integer[], array[%s]::text[], '{1000}', '{NULL}', array[%s]::bigint[]))", name, permits, holder, ticket)
	}
	for call, says := range map[string]string{
		"acquire_permit('jobs', 'me', 0)":                                   "p_permits must be between 1 and 10000",
		"acquire_permit('jobs', 'me', 10001)":                               "p_permits must be between 1 and 10000",
		"acquire_permit('jobs', 'me', null)":                                "p_permits must be between 1 and 10000",
		"acquire_permit('', 'me', 1)":                                       "p_lock_name must have 1 to 253 characters",
		"acquire_permit(null, 'me', 1)":                                     "p_lock_name must have 1 to 253 characters",
		"acquire_permit(repeat('j', 254), 'me', 1)":                         "p_lock_name must have 1 to 253 characters",
		"acquire_permit(repeat('j', 250), 'me', 10000)":                     "p_lock_name must have 1 to 249 characters",
		"acquire_permit('jobs', '', 1)":                                     "p_holder_id must have 1 to 255 characters",
		"acquire_permit('jobs', null, 1)":                                   "p_holder_id must have 1 to 255 characters",
		"acquire_permit('jobs', '*', 1)":                                    "not begin with *",
		"acquire_permit('jobs', 'me', 1, 0)":                                "p_ttl_seconds must be at least 1",
		"acquire_permit('jobs', 'me', 1, null)":                             "p_ttl_seconds must be at least 1",
		"acquire_permit('jobs', 'me', 1, 30, null)":                         "p_metadata must not be NULL",
		"acquire_permit('jobs', 'me', 1, 30, to_jsonb(repeat('j', 65536)))": "nor have more than 64 KiB",
		batch("'jobs'", "0", "'me'", "null"):                                "a semaphore has 1 to 10000 permits",
		batch("'jobs'", "10001", "'me'", "null"):                            "a semaphore has 1 to 10000 permits",
		batch("'jobs'", "null", "'me'", "null"):                             "a semaphore has 1 to 10000 permits",
		batch("null", "1", "'me'", "null"):                                  "a semaphore has 1 to 10000 permits",
		batch("repeat('j', 254)", "1", "'me'", "null"):                      "leaves room for # and the number of a permit",
		batch("'jobs'", "1, 1", "'me'", "null"):                             "every name needs permits, a holder",
		batch("'jobs'", "1", "'me', 'me'", "null"):                          "every name needs permits, a holder",
		batch("'jobs'", "1", "'me'", "null, 0"):                             "every name needs permits, a holder",
	} {
		_, err := d.query(call)
		if outcome("", err) != "22023" || !strings.Contains(fmt.Sprint(err), says) {
			t.Errorf("%s: %v, want that %s", call, err, says)
		}
	}
	d.want("select count(*) from distributed_locks", "0")
	d.want("char_length(acquire_permit(repeat('j', 253), 'me', 1))", "255")
	d.want("char_length(acquire_permit(repeat('j', 249), repeat('m', 255), 10000)) between 251 and 255", "true")

	// Above READ COMMITTED nobody can see who waits, and who does not care may ask.
	for _, level := range levels[1:] {
		s := d.begin(level)
		s.want(batch("'jobs'", "1", "'me'", "0"), "25001")
		s.rollback()
		s.begin(level)
		s.want(batch("'jobs'", "1", "'me'", "null"), "1")
		s.done()
	}
}

// B has seen that the permit is free, and is about to take it. Meanwhile another call for
// the same holder does: it is that one's, and not both's.
func TestTwoCallsForOneHolderNeverGetTheSamePermit(t *testing.T) {
	t.Parallel()
	d := installGated(t)
	for space, before := range map[string]string{
		"guard": "",
		"pin":   "select acquire_lock('jobs#1', 'W'); update distributed_locks set expires_at = clock_timestamp()", // by one that has run out
	} {
		d.do("delete from distributed_locks; " + before)
		b := d.connect()
		turnstile := d.turnstile()
		call := turnstile.stop(b, space, "acquire_permit('jobs', 'W', 1, 60)")
		d.want("acquire_permit('jobs', 'W', 1, 600, '1')", "jobs#1")
		turnstile.open()
		call.want("NULL")
		d.want("select concat_ws(' ', metadata, expires_at > now() + interval '1 minute') from distributed_locks", "1 t")
	}
}

func TestPermitsOfOneHolderAreDifferentOnes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.want("select string_agg(p, ' ' order by p) from (select acquire_permit('jobs', 'W', 3) as p from generate_series(1, 4)) p", "jobs#1 jobs#2 jobs#3")
	d.want("select string_agg(distinct holder_id, ' ') from distributed_locks", "W")
	for _, holder := range []string{"null", "''", "'*W'", "repeat('W', 256)"} {
		d.want("acquire_permit('other', "+holder+", 3)", "22023")
		d.want("(select permit from pgxlock_permit_batch('{other}', '{3}', array["+holder+"], '{1000}', '{null}', '{0}'))", "22023")
	}
}

// Each semaphore that is used leaves a row, and those of names that nobody uses any more
// go: a few with each that is written. Nobody waits for a session that does that.
func TestOldNumbersOfPermitsAreRemoved(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select acquire_permit('order:' || i, 'W', 1) from generate_series(1, 10) i")
	d.want("select count(*) from pgxlock_semaphores", "10")
	d.do("update pgxlock_semaphores set used_at = used_at - interval '2 days'")
	other := d.begin(readCommitted)
	other.do("select acquire_permit('order:10', 'W', 1)")
	d.want("acquire_permit('new', 'W', 1)", "new#1")
	d.want("acquire_permit('order:1', 'W', 2)", "order:1#2") // which says nothing, as its name is in use there
	other.commit()
	d.do("select acquire_permit('newer:' || i, 'W', 1) from generate_series(1, 2) i")
	d.want("select string_agg(name, ' ' order by name) from pgxlock_semaphores", "new newer:1 newer:2 order:10")
}
