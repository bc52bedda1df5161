// What docs/rights.md says that one application can do to others: all of it is so, and no more of it
// than is said.

package sqltest_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/monitor"
)

// possible are the entries of that list by their titles; evil and victim have roles of the kind
// application, and ops that of the kind administration.
var possible = map[string]func(d *database, evil, victim *process, ops *session){
	"Be another holder": func(d *database, evil, victim *process, _ *session) {
		victim.want("acquire_lock('be', 'V')", "true")
		old := d.get("select fencing_token from distributed_locks where lock_name = 'be'")
		evil.want("(try_acquire_lock('be', 'E')).acquired", "false")
		holder := evil.get("(select holder from pgxlock_holders('be'))")
		evil.want("extend_lock('be', '"+holder+"')", "true")
		evil.begin(readCommitted)
		evil.want("assert_lock_held('be', 'V') = "+old, "true")
		evil.commit()
		evil.want("release_lock('be', 'V') and acquire_lock('be', 'V')", "true")
		victim.begin(readCommitted)
		victim.want("assert_lock_held('be', 'V', "+old+")", "LK001")
		victim.rollback()
		victim.want("renew_lock('be', 'V', "+old+") is null", "true")
	},
	"Hold up others": func(_ *database, evil, victim *process, ops *session) {
		evil.want("acquire_lock('up', 'E', 2147483647)", "true")
		victim.want("acquire_lock('up', 'V')", "false")
		ops.want("evict_lock('up', 'E', (select fencing_token from lock_leases where lock_name = 'up'), 'why')", "true")
		evil.begin(readCommitted)
		evil.want("lock_tx('up')", "true")
		evil.want("claim_once('up')", "true")
		victim.want("lock_tx('up', '0')", "false")
		victim.want("claim_once('up', '0') is null", "true")
		evil.rollback()
	},
	"Disturb the order": func(d *database, evil, victim *process, _ *session) {
		low := evil.queue(0, "elsewhere")
		tv := victim.queue(0, "order")
		evil.refreshed(0, "order", low, "NULL")
		victim.want(take("order", "V", tv), stepBack)
		d.want("select live_until < clock_timestamp() + interval '61 s' from pgxlock_waiters where name = 'order' and ticket = "+low, "true")
		d.want(wake(0, "order", low), "1 "+low)
		d.pass(low)
		victim.want(take("order", "V", tv), granted("V"))
	},
	"End a wait with `ErrDeadlock`": func(_ *database, evil, victim *process, _ *session) {
		victim.want("acquire_lock('dead a', 'another') and acquire_lock('dead b', 'V')", "true")
		evil.queueHolding(0, "dead b", "another")
		victim.want("select deadlock from "+victim.publishes(0, "dead a", "NULL", asJSON("V")), "V")
	},
	"Keep tries for shared locks out": func(_ *database, evil, victim *process, ops *session) {
		ticket := evil.queue(1, "7")
		victim.want("(pgxlock_waited_for('{1}', '{7}'))[1]", "true")
		evil.want(wake(1, "7", "NULL"), "1 "+ticket)
		ops.want("reset_lock_state('waiters', '7')", "1")
		victim.want("(pgxlock_waited_for('{1}', '{7}'))[1]", "false")
	},
	"Wake waiters": func(_ *database, evil, victim *process, _ *session) {
		ticket := victim.queue(0, "wake")
		evil.want("wake_lock_waiter('wake')", "true")
		victim.hears("0:wake")
		victim.do("select pg_advisory_lock(77)")
		evil.want("pgxlock_notify_holders('{1}', '{77}')", "{1}")
		victim.want(take("wake", "V", ticket), granted("V"))
	},
	"Ask leaders to step down": func(d *database, evil, victim *process, ops *session) {
		victim.want("acquire_lock('lead', 'V')", "true")
		evil.want("pgxlock_ask_to_step_down(0, 'lead', 'ops', 'why')", "{V}")
		heard := "(select asked_by = " + quote(evil.get("select session_user")+" (ops)") + " from pgxlock_step_downs('{0}', '{lead}', '{V}'))"
		for range 2 { // and cannot take it away
			evil.want(heard, "true")
		}
		victim.want(heard, "true")
		ops.want("reset_lock_state('step_down', 'lead')", "1")
	},
	"Spend runs": func(d *database, evil, victim *process, ops *session) {
		evil.want("start_run('run', '1 day') is null", "false")
		evil.want("start_run_at('run', date_trunc('day', now() + interval '2 days', 'UTC'))", "true")
		evil.want("start_run_at('run', now() + interval '8 days')", "22023")
		evil.want("(pgxlock_start_run('run', now() + interval '99 years', null, null, null, '100 years', 'E', null)).attempt", "1")
		evil.want("(pgxlock_start_run('run', now() + interval '101 years', null, null, null, '100 years', 'E', null)).attempt", "22023")
		victim.want("start_run('run', '1 day') is null", "true")
		ops.want("reset_lock_state('runs', 'run')", "3")
		victim.want("start_run('run', '1 day') is null", "false")
		evil.want("finish_run('run', "+quote(d.get("select slot from pgxlock_runs"))+", 'forged')", "true")
	},
	"Spend claims": func(_ *database, evil, victim *process, ops *session) {
		evil.want("claim_once('claim', null, '100 years')", "true")
		victim.want("claim_once('claim')", "false")
		ops.want("reset_lock_state('claim', 'claim')", "1")
		victim.want("claim_once('claim')", "true")
	},
	"Read answers": func(_ *database, evil, victim *process, ops *session) {
		const read = "(select concat_ws(' ', outcome, convert_from(answer, 'UTF8')) from claim_request(%s))"
		victim.do("begin; select claim_request('post', 'f'), answer_request('post', 'f', 'secret'); commit")
		evil.want(fmt.Sprintf(read, "'post', 'a guess'"), "other")
		evil.want(fmt.Sprintf(read, "'post', 'f'"), "answered secret")
		evil.want("answer_request('post', 'f', 'forged')", "55000")
		evil.want("(select count(*) from pgxlock_claims)", "42501")
		evil.do("begin; select claim_request('next', 'f'), answer_request('next', 'f', 'forged'); commit")
		victim.want(fmt.Sprintf(read, "'next', 'f'"), "answered forged")
		ops.want("reset_lock_state('claim', 'next')", "1")
		victim.want(fmt.Sprintf(read, "'next', 'f'"), "first")
	},
	"Use up rate limits, or give back": func(_ *database, evil, victim *process, ops *session) {
		evil.want("allow_rate('limit', 1e-9, 3, 3)", "true")
		victim.want("allow_rate('limit', 100, 10)", "false")
		victim.want("(select delay between interval '90 years' and interval '101 years' from reserve_rate('limit', 100, 10, 1, '0'))", "true")
		ops.want("reset_lock_state('limit', 'limit')", "1")
		victim.want("allow_rate('limit', 0.001, 1)", "true")
		victim.want("allow_rate('limit', 0.001, 1)", "false")
		tat := evil.get("(select tat from pgxlock_limit_batch(1000000000000, 1, '{limit}', '{1}', '{0}', '{null}'))")
		evil.want("(select granted from pgxlock_limit_batch(1000000000000, 1, '{limit}', '{1}', '{0}', '{"+tat+"}'))", "true")
		victim.want("allow_rate('limit', 0.001, 1)", "true")
	},
	"Exceed semaphores": func(_ *database, evil, victim *process, _ *session) {
		victim.want("acquire_permit('jobs', 'V', 1)", "jobs#1")
		evil.want("acquire_permit('jobs', 'E', 2)", "jobs#2")
	},
	"Fill up": func(d *database, evil, _ *process, ops *session) {
		evil.want("(select count(acquire_lock('full ' || i, 'E')) from generate_series(1, 10) i)", "10")
		evil.want("pgxlock_publish_names(array['a name']) is null", "false") // void is not NULL
		evil.want("(select count(lock_tx('full ' || i)) from generate_series(1, 10) i)", "10")
		ops.want("evict_lock('full 1', 'E', (select fencing_token from lock_leases where lock_name = 'full 1'), 'why')", "true")
	},
	"Read metadata": func(_ *database, evil, victim *process, _ *session) {
		victim.want(`acquire_lock('meta', 'V', 30, '{"host": "db1"}')`, "true")
		evil.want("(select metadata::jsonb->>'host' from pgxlock_holders('meta'))", "db1")
		evil.want("(select count(*) from distributed_locks)", "42501")
	},
}

func TestDocumentedPowersOfApplicationsAreAllThereAre(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	page, err := os.ReadFile("../../docs/rights.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## What an application can still do\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var titles []string
	for _, m := range regexp.MustCompile(`(?m)^- \*\*([^*]+)\*\*`).FindAllStringSubmatch(section, -1) {
		titles = append(titles, strings.TrimRight(m[1], ".:,"))
	}
	slices.Sort(titles)
	if tested := slices.Sorted(maps.Keys(possible)); !slices.Equal(titles, tested) {
		t.Errorf("docs/rights.md lists\n%q, and these are tested:\n%q", titles, tested)
	}

	d := install(t)
	roles := d.harden("application", "application", "administration")
	evil, victim, ops := d.deaf(), d.process(), d.as(roles[2])
	evil.do("set session authorization " + roles[0])
	victim.do("set session authorization " + roles[1])
	for title, attack := range possible {
		t.Log(title)
		attack(d, evil, victim, ops)
	}
}

// pg_locks shows the number of a session's liveness key. A role that has queued for it when the session
// ends seems to be the session: its fence passes beside a holder without tokens, which no function of
// pgxlock sees, and fails once a holder has a token.
func TestLivenessKeyOfASessionCanBeInherited(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	h, stranger, other := d.holder(), d.connect(), d.connect()
	token := h.lock(1)
	queues := stranger.start(fmt.Sprintf("pg_advisory_lock(pgxlock_session_key(%d))", h.number))
	queues.waitsFor(h.session)
	h.end()
	queues.want("")
	other.want("pg_try_advisory_lock(1)", "true")
	d.want(h.fence(1, token), fmt.Sprint(token))
	other.want("pg_advisory_unlock(1)", "true")
	d.holder().lock(1)
	d.want(h.fence(1, token), missing(readCommitted))
}

// PostgreSQL waits for some locks before it checks rights. A role with no right but USAGE on the schema keeps
// all callers out of a table: one session reads nothing but keeps the lock of parsing a query, and another waits
// behind it for a lock that it may not have. The doctor and the Monitor say so.
func TestTablesAreKeptLockedByARoleWithUSAGEAlone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	victim := d.as(d.harden("application")[0])
	role := d.role()
	d.do("grant usage on schema public to " + role)
	parses, waits := d.as(role), d.as(role)
	parses.do("begin; prepare q as select from distributed_locks")
	waits.do("create function pg_temp.wait() returns void language plpgsql as " +
		"$$ begin create temp table part partition of public.distributed_locks for values in ('k'); end $$")
	wait := waits.start("pg_temp.wait()")
	wait.waitsFor(parses)
	acquire := victim.start("acquire_lock('k', 'V')")
	acquire.waitsFor(waits)

	pool := pgtest.Pool(t, d.url)
	findings, err := doctor.Check(t.Context(), pool, nil)
	i := slices.IndexFunc(findings, func(f doctor.Finding) bool { return f.Check == "table_locks" })
	if err != nil || i < 0 || findings[i].Status != doctor.StatusWarning || !strings.Contains(findings[i].Detail, "AccessExclusiveLock on distributed_locks") {
		t.Fatalf("the doctor: %v, %v", findings, err)
	}
	m, err := monitor.New(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Snapshot(t.Context()); !errors.Is(err, pgxlock.ErrUnavailable) || !strings.Contains(err.Error(), "another session keeps a table") {
		t.Errorf("the Monitor: %v", err)
	}

	ends := regexp.MustCompile(`pg_terminate_backend\(\d+\)`).FindAllString(findings[i].Advice, -1)
	if want := []string{fmt.Sprintf("pg_terminate_backend(%d)", waits.pid), fmt.Sprintf("pg_terminate_backend(%d)", parses.pid)}; !slices.Equal(ends, want) {
		t.Errorf("the doctor advises %q, want %q", ends, want)
	}
	parses.rollback()
	acquire.want("true")
	wait.outcome()
}

// Likewise for a lock that keeps only vacuum away: of several parents PostgreSQL locks each before it looks whether
// the role owns one. The last is a table for which another session of the role waits, behind a third.
func TestVacuumIsKeptAwayByARoleWithUSAGEAlone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	role := d.role()
	d.do("create schema other; create table other.t (); grant usage on schema public, other to " + role)
	parses, waits, inherits := d.as(role), d.as(role), d.as(role)
	parses.do("begin; prepare q as select from other.t")
	for s, clause := range map[*session]string{waits: "partition of other.t for values in ('k')", inherits: "() inherits (public.distributed_locks, other.t)"} {
		s.do("create function pg_temp.wait() returns void language plpgsql as $$ begin create temp table part " + clause + "; end $$")
	}
	partition := waits.start("pg_temp.wait()")
	partition.waitsFor(parses)
	inherited := inherits.start("pg_temp.wait()")
	inherited.waitsFor(waits)
	d.want("acquire_lock('k', 'V')", "true")

	findings, err := doctor.Check(t.Context(), pgtest.Pool(t, d.url), nil)
	i := slices.IndexFunc(findings, func(f doctor.Finding) bool { return f.Check == "table_locks" })
	if err != nil || i < 0 || findings[i].Status != doctor.StatusWarning || !strings.Contains(findings[i].Detail, "ShareUpdateExclusiveLock on distributed_locks: vacuum waits") ||
		!strings.Contains(findings[i].Advice, fmt.Sprintf("pg_terminate_backend(%d)", inherits.pid)) {
		t.Fatalf("the doctor: %v, %v", findings, err)
	}
	d.do("set lock_timeout = '10ms'")
	if _, err := d.conn.Exec(t.Context(), "vacuum distributed_locks"); err == nil {
		t.Error("vacuum has the table")
	}
	parses.rollback()
	partition.outcome()
	inherited.outcome()
}
