// The views of holders and waiters.

package sqltest_test

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// holders are what lock_holders shows of one name.
func holders(name string) string {
	return fmt.Sprintf(`select coalesce(string_agg(concat_ws(' ', kind, mode, holder_id, pid, fencing_token, held_for >= '0', remaining > '0', expires_at - acquired_at, key_space, key_id), ', '
		order by holder_id), '') from lock_holders where lock_name = %s`, quote(name))
}

// waiters are what lock_waiters shows of one name.
func waiters(name string) string {
	return fmt.Sprintf(`select coalesce(string_agg(concat_ws(' ', kind, mode, owner, pid, waiters, waiting_for >= '0', since <= clock_timestamp(), blocked_by, held_by, ticket, key_space, key_id), ', '
		order by ticket, pid), '') from lock_waiters where lock_name = %s`, quote(name))
}

func TestViewOfHoldersShowsLeasesSharesAndPermitsThatAreLive(t *testing.T) {
	t.Parallel()
	d := install(t)
	token := d.token("k", "A")
	d.want(holders("k"), fmt.Sprintf("lease exclusive A %d t t 01:00:00", token))
	d.expire("k")
	d.want(holders("k"), "")

	d.do("select acquire_shared_lock('s', 'A', 60), acquire_shared_lock('s', 'B', 60), acquire_shared_lock('s', 'C', 60)")
	d.expireShare("s", "C")
	token = d.number("select fencing_token from lock_leases where lock_name = 's'")
	d.want(holders("s"), fmt.Sprintf("lease shared A %d t t 00:01:00, lease shared B %[1]d t t 00:01:00", token))

	permit := d.get("acquire_permit('jobs', 'A', 3, 60)")
	token = d.number("select fencing_token from lock_leases where lock_name = " + quote(permit))
	d.want(holders(permit), fmt.Sprintf("lease exclusive A %d t t 00:01:00", token))
	d.want(fmt.Sprintf("evict_lock(%s, 'A', %d, 'why')", quote(permit), token), "true")
	d.want(holders(permit), "")

	d.do("select acquire_lock('for good', 'A'); update distributed_locks set acquired_at = '-infinity', expires_at = 'infinity' where lock_name = 'for good'")
	d.want("select concat_ws(' ', state, held_for, remaining) from lock_holders join lock_leases using (lock_name, held_for, remaining) where lock_name = 'for good'", "NULL")
	d.want("select concat_ws(' ', mode, held_for, remaining, expires_at) from lock_holders where lock_name = 'for good'", "exclusive infinity")
}

func TestViewOfHoldersShowsAdvisoryLocksWhoeverHasThem(t *testing.T) {
	t.Parallel()
	d := install(t)
	s, locker := d.connect(), d.connect()
	locker.do("set application_name = 'pgxlock worker-1'")
	id := d.number("advisory_lock_key('invoice:42')")
	locker.do("select pgxlock_publish_names('{invoice:42}'), pg_advisory_lock(advisory_lock_key('invoice:42'))")
	d.want(holders("invoice:42"), fmt.Sprintf("advisory exclusive worker-1:%d %[1]d 1 %d", locker.pid, id))

	s.do("set application_name = ''; select pg_advisory_lock_shared(-7), pg_advisory_lock(-1, -2), pg_advisory_lock(3, 4)")
	s.do("begin; select pg_advisory_xact_lock(8)")
	d.want(holders("#-7"), fmt.Sprintf("advisory shared %d %[1]d 1 -7", s.pid))
	d.want(holders("#-1,-2"), fmt.Sprintf("advisory exclusive %d %[1]d 2 -2", s.pid))
	d.want(holders("#3,4"), fmt.Sprintf("advisory exclusive %d %[1]d 2 %d", s.pid, int64(3<<32|4)))
	d.want(holders("#8"), fmt.Sprintf("advisory exclusive %d %[1]d 1 8", s.pid))
	s.rollback()
	d.want(holders("#8"), "")

	// The view shows the arguments that evict_advisory_lock() takes.
	d.want("(select evict_advisory_lock(pid, key_id, 'why', key_space) from lock_holders where lock_name = '#3,4')", "true")

	// With the token that the lock's own session drew: a dead one's is not it.
	dead, h := d.holder(), d.holder()
	dead.end()
	token := h.lock(99)
	h.share(98)
	d.do(fmt.Sprintf("insert into pgxlock_advisory_locks values (1, 99, %d, false, %d)", dead.number, token-1))
	d.want("select concat_ws(' ', pid, fencing_token, mode) from lock_holders where key_id = 99", fmt.Sprintf("%d %d exclusive", h.pid, token))
	d.want("select concat_ws(' ', pid, fencing_token, mode) from lock_holders where key_id = 98", fmt.Sprintf("%d shared", h.pid))
}

func TestViewOfWaitersShowsForWhomTheyWait(t *testing.T) {
	t.Parallel()
	d := install(t)
	a, deaf, dead := d.process(), d.deaf(), d.process()

	d.token("k", "H")
	first, second := a.queue(0, "k"), deaf.queue(0, "k")
	d.want(waiters("k"), fmt.Sprintf("lease me %d 1 t t {} {H} %s, lease me 1 t t {} {H} %s", a.listener.pid, first, second))
	d.expire("k")
	d.want("select string_agg(held_by::text, ' ') from lock_waiters where lock_name = 'k'", "{} {}")
	dead.queue(0, "dead")
	dead.die()
	d.want(waiters("dead"), "")
	deaf.queue(0, "late")
	d.do("update pgxlock_waiters set live_until = clock_timestamp() where name = 'late'")
	d.want(waiters("late"), "")

	d.do("select acquire_shared_lock('s', 'A'), acquire_shared_lock('s', 'B')")
	ticket := deaf.queue(0, "s")
	d.want(waiters("s"), "lease me 1 t t {} {A,B} "+ticket)

	d.do("select acquire_permit('jobs', 'A', 1), acquire_lock('jobs#none', 'B')")
	ticket = deaf.queue(0, "jobs#")
	d.want(waiters("jobs#"), "lease me 1 t t {} {A} "+ticket)

	s := d.connect()
	s.do("set application_name = 'pgxlock worker'; select pg_advisory_lock(-7), pg_advisory_lock_shared(-1, -2), pgxlock_publish_names('{k}'), pg_advisory_lock(advisory_lock_key('k'))")
	by := fmt.Sprintf("{%d} {worker:%[1]d}", s.pid)
	ticket = a.queue(1, "-7")
	d.want(waiters("#-7"), fmt.Sprintf("advisory me %d 1 t t %s %s 1 -7", a.listener.pid, by, ticket))
	ticket = deaf.queue(2, "-2")
	d.want(waiters("#-1,-2"), fmt.Sprintf("advisory me 1 t t %s %s 2 -2", by, ticket))
	ticket = deaf.queue(1, d.get("advisory_lock_key('k')"))
	d.want("select concat_ws(' ', lock_name, held_by) from lock_waiters where ticket = "+ticket, fmt.Sprintf("k {worker:%d}", s.pid))

	// Who waits in the server.
	w := d.connect()
	w.do("set application_name = 'psql'")
	waiting := w.start("pg_advisory_lock_shared(-7)")
	waiting.waitsFor(s)
	d.want("select concat_ws(' ', kind, mode, owner, pid, waiters, waiting_for >= '0', since <= clock_timestamp(), blocked_by, held_by, key_space, key_id) from lock_waiters where lock_name = '#-7' and ticket is null",
		fmt.Sprintf("advisory shared psql:%d %[1]d 1 t t %s 1 -7", w.pid, by))
	d.want("(select count(*) from lock_holders where pid = "+fmt.Sprint(w.pid)+")", "0")
	s.do("select pg_advisory_unlock_all()")
	waiting.want("")
	d.want("(select count(*) from lock_waiters where ticket is null)", "0")

	// What nobody can have published is nobody's.
	d.do("insert into pgxlock_waiters select 1, name, 1, null, '', 1, now(), 'infinity' from unnest('{seven,99999999999999999999,9223372036854775808,-}'::text[]) name")
	d.want("(select count(*) from lock_waiters where owner = '')", "0")
	d.do("insert into pgxlock_waiters select 1, name, 1, null, '', 1, now(), 'infinity' from unnest('{9223372036854775807,-9223372036854775808}'::text[]) name")
	d.want("(select count(*) from lock_waiters where owner = '')", "2")
}

// What pgxlock locks for itself is no user's hold: guards, pins, and what shows that sessions live.
func TestViewsShowNoneOfPgxlocksOwnKeys(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	h, p := d.holder(), d.process()
	token := h.lock(42)
	p.queue(1, "42")
	acquiring, fencing := d.begin(readCommitted), d.begin(readCommitted)
	d.do("select acquire_lock('k', 'A'), acquire_shared_lock('s', 'B')")
	acquiring.want("acquire_lock('new', 'A')", "true")            // guard and pin
	fencing.want("assert_lock_held('k', 'A') > 0", "true")        // pin
	fencing.want("assert_shared_lock_held('s', 'B') > 0", "true") // two pins
	fencing.want(h.fence(42, token), fmt.Sprint(token))           // pin
	meddler := d.connect()
	meddling := meddler.start("pg_advisory_lock(pgxlock_waiter_key(" + p.client + "))")
	meddling.waitsFor(p.listener)
	d.want(`select string_agg(n::text, ',' order by own) from (select pgxlock_is_own_key(objsubid, classid::bigint << 32 | objid::bigint) as own, count(*) as n
		from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database()) and granted group by own) l`, "1,8")
	d.want("select string_agg(lock_name || ' ' || coalesce(fencing_token, 0)::text, ',' order by lock_name) from lock_holders where kind = 'advisory'", fmt.Sprintf("#42 %d", token))
	d.want("select string_agg(concat_ws(' ', lock_name, owner, pid, blocked_by), ',') from lock_waiters", fmt.Sprintf("#42 me %d {%d}", p.listener.pid, h.pid))

	// A user's key may carry the mark by chance. It is shown where its name is known.
	const name = "order:23115415"
	user, next := d.connect(), d.connect()
	user.do("select pg_advisory_lock(advisory_lock_key('" + name + "'))")
	waiting := next.start("pg_advisory_lock(advisory_lock_key('" + name + "'))")
	waiting.waitsFor(user)
	d.want("pgxlock_is_own_key(1, advisory_lock_key('"+name+"'))", "true")
	for _, view := range []string{"lock_holders", "lock_waiters"} {
		d.want("(select count(*) from "+view+" where kind = 'advisory')", "1")
	}
	d.do("select pgxlock_publish_names('{" + name + "}')")
	d.want(holders(name), fmt.Sprintf("advisory exclusive %d %[1]d 1 8100966466993600997", user.pid))
	d.want("select concat_ws(' ', pid, held_by) from lock_waiters where lock_name = '"+name+"'", fmt.Sprintf("%d {%d}", next.pid, user.pid))
	user.do("select pg_advisory_unlock_all()")
	waiting.want("")
	p.listener.do("select pg_advisory_unlock_all()")
	meddling.want("")
}

// Reading pg_locks stops the server's lock table for a moment.
func TestEachViewReadsTheLockTableOnce(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do(`create function reads(p_view text) returns bigint language plpgsql as $$
		declare
		  v_line text;
		  v_count bigint := 0;
		begin
		  for v_line in execute 'explain (costs off) select * from ' || p_view loop
		    v_count := v_count + (v_line like '%Function Scan on pg_lock_status%')::integer;
		  end loop;
		  return v_count;
		end $$`)
	d.want("reads('lock_holders')", "1")
	d.want("reads('lock_waiters')", "1")
	d.want("reads('lock_holders h join lock_waiters w using (kind, lock_name)')", "2")
}

// Hardened or not, with no right on a table, and with none to look at others' sessions.
func TestMonitoringReadsTheViewsOfHoldersAndWaiters(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	by := d.connect()
	by.do("set application_name = 'psql'; select acquire_lock('k', 'A'), pg_advisory_lock(7)")
	d.deaf().queue(0, "k")
	w := d.connect()
	waiting := w.start("pg_advisory_lock(7)")
	waiting.waitsFor(by)
	check := func(role string) {
		t.Helper()
		s := d.as(role)
		s.want("select string_agg(concat_ws(' ', lock_name, holder_id), ',' order by kind) from lock_holders where lock_name in ('k', '#7')", fmt.Sprintf("#7 psql:%d,k A", by.pid))
		s.want("select string_agg(concat_ws(' ', lock_name, pid, blocked_by, held_by), ',' order by kind) from lock_waiters",
			fmt.Sprintf("#7 %d {%d} {psql:%[2]d},k {} {A}", w.pid, by.pid))
		s.want("(select count(*) from (select h.*, w.* from lock_holders h, lock_waiters w) x) > 0", "true")
	}
	soft, nobody := d.role(), d.role()
	d.do("select grant_locks('" + soft + "', 'monitoring')")
	check(soft)
	roles := d.harden("monitoring", "administration", "application")
	check(roles[0])
	check(roles[1])
	for _, role := range []string{soft, nobody, roles[2]} {
		for _, view := range []string{"lock_holders", "lock_waiters"} {
			d.as(role).want("(select count(*) from "+view+")", "42501")
		}
	}
	by.do("select pg_advisory_unlock_all()")
	waiting.want("")
}

// A view reads tables with the rights of its owner, and calls functions with those of its
// reader. So SELECT on a view is not enough, and neither is SELECT on a view made over it.
func TestReadersOfTheViewsNeedTheRightsOfTheirFunctions(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	by := d.connect()
	by.do("select pg_advisory_lock(7)") // else nobody's name is looked for
	d.do("select acquire_lock('k', 'A'); create view mine as select h.lock_name from lock_holders h left join lock_waiters w using (kind, lock_name)")
	const count = "(select count(lock_name) from %s)"
	views := []string{"lock_holders", "lock_waiters", "mine"}
	check := func(role, needs string) {
		t.Helper()
		d.do("grant select on lock_holders, lock_waiters, mine to " + role)
		for _, view := range views {
			d.as(role).want(fmt.Sprintf(count, view), "42501")
		}
		d.do("grant " + needs + " to " + role)
		for i, want := range []string{"2", "0", "2"} {
			d.as(role).want(fmt.Sprintf(count, views[i]), want)
		}
	}
	check(d.role(), "select on pgxlock_names, pgxlock_advisory_locks, pgxlock_waiters")
	d.harden()
	check(d.role(), `execute on function pgxlock_list_names(), pgxlock_list_tokens(), pgxlock_list_tickets(), pgxlock_own_key(boolean, bytea),
		pgxlock_is_own_key(integer, bigint), pgxlock_session_key(bigint), pgxlock_waiter_key(bigint)`)
}
