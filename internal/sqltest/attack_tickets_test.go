// Attacks by a role of the kind application on waiters of another one: forged tickets, and tickets
// of others.

package sqltest_test

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// foes are two processes of two roles of the kind application, in a hardened database: one that
// waits, and one that wishes it harm, and draws a lower number first.
func (d *database) foes() (victim, evil *process, low string) {
	d.t.Helper()
	roles := d.harden("application", "application")
	evil, victim = d.deaf(), d.process()
	for i, p := range []*process{evil, victim} {
		p.do("set session authorization " + roles[i])
	}
	return victim, evil, evil.queue(0, "elsewhere")
}

// asked is a refresh by its answer: whether to try, and the ticket ahead.
func (p *process) asked(kind int, name, ticket string) string {
	p.t.Helper()
	return p.get("select concat_ws(' ', ask, behind) from " + p.publishes(kind, name, ticket, "NULL"))
}

// A number that the sequence has not given is replaced by one that it gives.
func TestForgedNumberComesLast(t *testing.T) {
	t.Parallel()
	d := install(t)
	victim, evil, low := d.foes()
	tv := victim.queue(0, "k")
	for _, number := range []string{"-9223372036854775808", "-1", "0", "9223372036854775807", "1000"} {
		evil.want("select ticket > "+tv+" and ticket <> "+number+" from "+evil.publishes(0, "k", number, "NULL"), "true")
		if got := victim.asked(0, "k", tv); got != "t" {
			t.Errorf("ahead of %s, with the number %s: %q", tv, number, got)
		}
	}
	victim.want(take("k", "V", tv), granted("V"))
	// Nor does it change the order in which rows are locked, in which nobody waits for each other.
	evil.do("select pgxlock_publish_batch('{0,0}', '{l,l}', '{-1," + low + "}', '{1,1}', '{null,null}', null, 'o', 60000, 1)")
	d.want("select array_agg(ticket order by ctid) = array_agg(ticket order by ticket) from pgxlock_waiters where name = 'l'", "true")
}

// It has drawn an earlier number elsewhere, does not try, and nobody releases the lock: the waiter
// behind it learns which ticket is ahead, and has it passed.
func TestForgedTicketOnAFreeLockIsPassed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	victim, evil, low := d.foes()
	for _, kind := range []int{0, 1} {
		tv := victim.queue(kind, "7")
		evil.want("select ticket from "+evil.publishes(kind, "7", low, "NULL"), low)
		if got, want := victim.asked(kind, "7", tv), "f "+low; got != want {
			t.Fatalf("got %q, want %q", got, want)
		}
		victim.want(wake(kind, "7", low), "1 "+low)
		d.pass(low)
		// Neither a refresh nor a claim to have tried makes it first again.
		evil.want("select ticket from "+evil.publishes(kind, "7", low, "NULL"), low)
		if kind == 0 {
			evil.do("select pgxlock_refused_batch('{0}', '{7}', '{" + low + "}')")
		}
		victim.want(wake(kind, "7", low), "1 "+tv)
		victim.hears(fmt.Sprint(kind, ":7"))
		if got := victim.asked(kind, "7", tv); got != "t" {
			t.Errorf("got %q", got)
		}
	}
	victim.want(take("7", "V", d.get("select max(ticket) from pgxlock_waiters where kind = 0 and name = '7'")), granted("V"))
	if got := victim.asked(0, "7", "NULL"); got != "f" {
		t.Errorf("of a lease that is held: %q", got)
	}
}

func TestTicketIsOfItsRole(t *testing.T) {
	t.Parallel()
	d := install(t)
	victim, evil, _ := d.foes()
	tv := victim.queue(0, "k")
	const row = "select concat_ws(' ', ticket, client, waiters, live_until, holds, woken, role) from pgxlock_waiters where name = 'k' order by ticket limit 1"
	want := d.get(row)
	unchanged := func(what string) {
		t.Helper()
		if got := d.get(row); got != want {
			t.Errorf("%s: %s, was %s", what, got, want)
		}
	}
	evil.want("select ticket > "+tv+" from "+evil.publishes(0, "k", tv, asJSON("h")), "true")
	unchanged("published with its number")
	evil.do("select pgxlock_withdraw_batch('{0}', '{k}', '{" + tv + "}')")
	unchanged("withdrawn")
	evil.want(take("k", "E", tv), granted("E"))
	unchanged("used to acquire the lease")
	d.do("update pgxlock_waiters set woken = clock_timestamp() where name = 'k'")
	want = d.get(row)
	evil.want(take("k", "F", tv), busy("E"))
	unchanged("used in a try that was refused")

	// Of its own role, but in another session, all of that works.
	other := d.as(d.get("select role from pgxlock_waiters where ticket = " + tv))
	other.do("select pgxlock_withdraw_batch('{0}', '{k}', '{" + tv + "}')")
	if got := d.get(row); got == want {
		t.Error("not withdrawn")
	}
}

// What a ticket says of advisory locks counts if the session that has them is of its role.
func TestForgedHoldOfAnAdvisoryLockMakesNoDeadlock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	victim, evil, _ := d.foes()
	holder := d.connect()
	holder.do("select pg_advisory_lock(7)")
	d.want("acquire_lock('lease', 'V')", "true")
	evil.queueHolding(0, "lease", fmt.Sprintf("advisory:%d:1:7", holder.pid))
	look := "select deadlock from " + victim.publishes(1, "7", "NULL", asJSON("V"))
	victim.want(look, "NULL")
	d.do("update pgxlock_waiters set role = " + quote(d.get("select usename from pg_stat_activity where pid = "+fmt.Sprint(holder.pid))) + " where name = 'lease'")
	victim.want(look, "V")
}

// A queue with any number of tickets of dead processes works, and heals: the server has not room for
// a lock for each.
func TestQueueOfManyDeadTicketsHeals(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	const dead = 60000
	for _, kind := range []int{0, 1} {
		p := d.process()
		d.do(fmt.Sprintf(`insert into pgxlock_waiters select %d, '7', nextval('pgxlock_tickets'), i, 'evil', 1, now(), now() + '1 hour', null, '{h}' from generate_series(1, %d) i`, kind, dead))
		d.want(fmt.Sprintf("(pgxlock_waited_for('{%d}', '{7}'))[1]", kind), "true") // of so many it cannot be sure
		ticket := p.queueHolding(kind, "7", "mine")
		calls := []string{p.publishes(kind, "7", ticket, asJSON("mine")), fmt.Sprintf("pgxlock_wake_batch('{%d}', '{7}', '{null}')", kind)}
		if kind == 0 {
			calls = append(calls, "pgxlock_acquire_batch('{7}', '{P}', '{60000}', '{null}', array["+ticket+"]::bigint[])")
		}
		left := fmt.Sprintf("select count(*) from pgxlock_waiters where kind = %d and ticket <> %s", kind, ticket)
		for n := 0; d.get(left) != "0"; n++ {
			if n > dead/10000 {
				t.Fatalf("kind %d: %s tickets are left", kind, d.get(left))
			}
			p.do("select * from " + calls[n%len(calls)])
		}
		p.do(fmt.Sprintf("select pgxlock_withdraw_batch('{%d}', '{7}', '{%s}')", kind, ticket))
		d.want(fmt.Sprintf("(pgxlock_waited_for('{%d}', '{7}'))[1]", kind), "false")
	}
	d.want("select count(*) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database()) and not exists (select from pgxlock_waiters)", "2") // of the two listeners
}

// A thousand tickets wait for a lock of a holder that each of them claims, and a thousand for others of its locks:
// each caller that waits while it holds a lock would look at the pairs of them, a million.
func TestForgedHoldsCostOtherWaitersNoPairs(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	evil := d.as(d.harden("application")[0])
	publish := func(names, hold string) {
		t.Helper()
		evil.want(publishing(map[string]string{
			"kinds": "array_fill(0, '{1000}')", "names": names, "tickets": "array_fill(null::bigint, '{1000}')",
			"waiters": "array_fill(1, '{1000}')", "holds": "array_fill('[\"" + hold + "\"]'::text, '{1000}')", "live": "60000",
		}), "1000")
	}
	publish("array_fill('k'::text, '{1000}')", "E")
	evil.want("acquire_lock('k', 'E')", "true")
	victim := d.connectAnew()
	victim.do("set temp_file_limit = '8MB'")
	victim.want(publishing(map[string]string{"names": "'{other}'", "holds": `array['["V"]']`}), "1")

	// The plan of the search itself, also with a semaphore, and with a lock that lets all of them go on.
	publish("array(select 'k' || i from generate_series(1, 1000) i)", "X")
	evil.want("(select count(*) from generate_series(1, 1000) i where acquire_lock('k' || i, 'E'))", "1000")
	d.do(`do $$ begin execute (select 'prepare search(integer[], text[], bigint[], boolean) as ' || replace(replace(replace(replace(
		substring(prosrc from 'RETURN QUERY(.*);[[:space:]]+END'), 'p_kinds', '$1'), 'p_names', '$2'), 'p_tickets', '$3'), 'v_advisory', '$4')
		from pg_proc where proname = 'pgxlock_deadlocks'); end $$`)
	d.do("set plan_cache_mode = force_generic_plan; set enable_bitmapscan = off; set jit = off")
	evil.want("acquire_permit('jobs', 'z', 1)", "jobs#1")
	for _, release := range []string{"false", "release_lock('k', 'E')"} {
		evil.get(release)
		for _, name := range []string{"other", "jobs#"} {
			ticket := d.process().queueHolding(0, name, "V")
			if rows := d.reads(fmt.Sprintf("execute search('{0}', '{%s}', '{%s}', false)", name, ticket)); rows > 200_000 {
				t.Errorf("%s, %s: the search reads %.0f rows of 2000 tickets", release, name, rows)
			}
		}
	}
}
