// Least privilege: what roles of each kind may do, hardened and not, what an attacker among
// them tries, and row-level security.

package sqltest_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// as opens a session of the role. Rights are those of current_user, no matter who
// logged in.
func (d *database) as(role string) *session {
	d.t.Helper()
	s := d.connect()
	s.do("set session authorization " + role) // as if it had: RESET ROLE does not help it
	return s
}

// harden hardens the database, and makes a role of each of the kinds.
func (d *database) harden(kinds ...string) (roles []string) {
	d.t.Helper()
	d.do("select harden_locks()")
	for _, kind := range kinds {
		role := d.role()
		d.do(fmt.Sprintf("select grant_locks('%s', '%s')", role, kind))
		roles = append(roles, role)
	}
	return roles
}

// kinds are what grant_locks takes.
var kinds = []string{"application", "monitoring", "administration"}

// everything calls each function and reads and writes each table. What the named
// kinds may do gives the result, in any other kind's session it is 42501.
var everything = []struct {
	expression string
	want       string
	kinds      string // hardened
	soft       string // more kinds that may when it is not
}{
	{"acquire_lock('new', 'me')", "true", "application", ""},
	{"acquire_lock('held', 'me')", "false", "application", "monitoring administration"}, // a look at the table is all it takes
	{"(try_acquire_lock('new', 'me')).acquired", "true", "application", ""},
	{"(acquire_in_turn('new', 'me')).acquired", "true", "application", ""},
	{"(acquire_in_turn('held', 'me')).acquired", "false", "application", ""},
	{"leave_queue('queue', 'me')", "false", "application", "administration"},
	{"(acquire_shared_in_turn('shared', 'me')).acquired", "true", "application", ""},
	{"(acquire_shared_in_turn('held', 'me')).acquired", "false", "application", ""},
	{"(acquire_permits_in_turn('jobs', 'me', 2, 2)).permits::text", "{jobs#1,jobs#2}", "application", ""},
	{"(pgxlock_wait_in_turn('jobs', 'me', 30, null, '{}', false, 1, 1)).permits::text", "{jobs#1}", "", "application"},
	{"pgxlock_check_semaphore('jobs', 1) is null", "false", "", "application monitoring administration none"},
	{"pgxlock_full_xid('1') is null", "false", "", "application monitoring administration none"},
	{"(select count(*) from pgxlock_deadlocks('{0}', '{queue}', '{-5}'))", "0", "", "application monitoring administration"},
	{"renew_lock('held', 'other', 1) is null", "true", "application", "monitoring administration"},
	{"renew_lock('held', 'other', (try_acquire_lock('held', 'other')).fencing_token) is null", "false", "application", "administration"},
	{"extend_lock('held', 'other')", "true", "application", "administration"},
	{"assert_lock_held('held', 'other') > 0", "true", "application", "monitoring administration"},
	{"lock_tx('k')", "true", "application", "monitoring administration none"},
	{"claim_once('k')", "true", "application", ""},
	{"advisory_lock_key('invoice:42')", "6688477336110245193", "application monitoring administration", "none"},
	{"advisory_lock_key_in('billing', 'invoice:42')", "1572001551135567388", "application monitoring administration", "none"},
	{"pgxlock_version() >= 6", "true", "application monitoring administration", "none"},
	{"(select count(*) from pgxlock_acquire_batch('{batch}', '{me}', '{1000}', '{null}', '{null}'))", "1", "application", ""},
	{"(select token is not null from pgxlock_acquire_one('batch', 'me', 1000, null, null))", "true", "application", ""},
	{"(select count(*) from pgxlock_renew_batch('{held}', '{other}', '{1}', '{1000}'))", "1", "application", "administration"},
	{"(select count(*) from pgxlock_release_batch('{held}', '{x}', '{1}'))", "1", "application", "administration"},
	{"pgxlock_release_one('held', 'x', 1)", "g", "application", "administration"},
	{"(select holder from pgxlock_holders('held'))", "other", "application monitoring administration", ""},
	{"(pgxlock_advisory_batch('{1,2}', '{1,2}', pg_backend_pid()))[1] > 0", "true", "application", ""},
	{"assert_advisory_lock_held(1, 1, 7, 0) is null", "LK001", "application", "monitoring administration"},
	{"pgxlock_reap_advisory()", "0", "application administration", ""},
	{"(select count(*) from pgxlock_advisory_locks)", "0", "monitoring administration", "application"},
	{"pgxlock_next_tokens(1) is null", "false", "", "application monitoring administration none"},
	{"pgxlock_session_key(7) is null", "false", "monitoring administration", "application none"},
	{"pgxlock_advisory_call(0, 7) is null", "false", "", "application monitoring administration none"},
	{"pgxlock_clear_advisory(null)", "0", "", "application administration"},
	{"(select ask from pgxlock_publish_batch('{0}', '{k}', '{null}', '{1}', '{null}', 7, 'me', 1000, 1))", "true", "application", ""},
	{"(select ask from pgxlock_publish_batch('{0}', '{k}', '{1}', '{1}', '{\"[1]\"}', null, 'me', 1000, 1))", "true", "application", ""},
	{"(select tokens[1] is not null from pgxlock_acquire_batch('{new}', '{me}', '{1000}', '{null}', '{0}'))", "true", "application", ""},
	{"(select ahead[1] from pgxlock_acquire_batch('{queue}', '{me}', '{1000}', '{null}', '{0}'))", "true", "application", "administration"},
	{"(select woken_ticket from pgxlock_wake_batch('{0}', '{queue}', '{null}'))", "-5", "application", "administration"},
	{"wake_lock_waiter('queue')", "true", "application administration", ""},
	{"pgxlock_withdraw_batch('{0}', '{queue}', '{-5}') is null", "false", "application", "administration"}, // void is not NULL
	{"pgxlock_notify_holders('{1}', '{11}')", "{0}", "application", "monitoring administration none"},
	{"pgxlock_reap_waiters()", "1", "application administration", ""},
	{"pgxlock_waiter_key(7) is null", "false", "application monitoring administration", "none"},
	{"pgxlock_waiter_dead(7, 'infinity')", "true", "", "application monitoring administration none"},
	{"pgxlock_wake_timed_out(null)", "false", "", "application monitoring administration none"},
	{"pgxlock_remove_dead('{0}', '{queue}', '{0}') is null", "false", "", "application administration"},
	{"(select count(*) from pgxlock_waiters)", "2", "monitoring administration", "application"},
	{"start_run('daily', '36500 days') is null", "false", "application", ""},
	{"start_run('started', '36500 days') is null", "true", "application", "monitoring administration"}, // a look at the table is all it takes
	{"start_run_at('k', now())", "true", "application", ""},
	{"finish_run('ended', '2026-01-01 00:00+00')", "false", "application", ""},
	{"forget_run('ended', '2026-01-01 00:00+00')", "true", "administration", "application"},
	{"(select state from list_runs('ended'))", "succeeded", "application monitoring administration", ""},
	{"(select attempt from pgxlock_start_run('k', now(), null, null, null, '1 day', 'me', null))", "1", "application", ""},
	{"pgxlock_finish_run('ended', '2026-01-01 00:00+00', 'x', 'succeeded', null)", "true", "application", ""},
	{"(select due from pgxlock_due_runs('k', '1 h', '0', 'UTC', 0, false))", "true", "application", "monitoring administration"},
	{"pgxlock_slot(now(), '1 h', '0', 'UTC', 0) <= now()", "true", "", "application monitoring administration none"},
	{"(select count(*) from pgxlock_runs)", "2", "monitoring administration", "application"},
	{"nextval('pgxlock_tickets') is null", "false", "", "application"},
	{"ask_to_step_down('held')", "true", "application administration", ""},
	{"pgxlock_ask_to_step_down(0, 'held', 'me', '')", "{other}", "application administration", ""},
	{"(select count(*) from pgxlock_step_downs('{0}', '{held}', '{other}'))", "1", "application", "monitoring administration"},
	{"acquire_permit('jobs', 'me', 1)", "jobs#1", "application", ""},
	{"(select permit from pgxlock_permit_batch('{jobs}', '{1}', '{me}', '{1000}', '{null}', '{0}'))", "1", "application", ""},
	{"pgxlock_first_ahead(0, 'queue', 1)", "-5", "", "application monitoring administration"},
	{"pgxlock_settle_tickets('{queue}', '{-5}', '{true}', '{0}') is null", "false", "", "application administration"},
	{"pgxlock_refused_batch('{1}', '{11}', '{-7}') is null", "false", "application", "administration"},
	{"(pgxlock_waited_for('{0}', '{nobody}'))[1]", "false", "application", "monitoring administration"},
	{"(select count(*) from pgxlock_step_down)", "1", "monitoring administration", "application"},
	{"(select count(*) from pgxlock_semaphores)", "1", "monitoring administration", "application"},
	{"evict_lock('held', 'other', (select fencing_token from pgxlock_holders('held')), 'why')", "true", "administration", ""},
	{"evict_lock('held', 'other', 1, 'why')", "false", "administration", "application"},
	{"evict_advisory_lock(1, 1, 'why')", "false", "administration", "application monitoring none"},
	{"reset_lock_state('waiters', 'queue')", "1", "administration", "application"},
	{"reset_lock_state('limit', 'used')", "1", "administration", "application"},
	{"reset_lock_state('runs', 'ended')", "1", "administration", "application"},
	{"reset_lock_state('claim', 'used')", "0", "administration", ""},
	{"reset_lock_state('step_down', 'held')", "1", "administration", "application"},
	{"pgxlock_record_eviction(0, 'k', 'h', 1, 'why', null) is null", "false", "", "administration"},
	{"(select reason from pgxlock_evicted('{0}', '{k}', '{h}', '{1}'))", "why", "application", "monitoring administration"},
	{"pgxlock_publish_names('{k}') is null", "false", "application", ""},
	{"(select count(*) from pgxlock_evictions)", "1", "monitoring administration", "application"},
	{"(select count(*) from lock_holders where kind = 'lease')", "2", "monitoring administration", ""},
	{"(select count(*) from lock_waiters)", "1", "monitoring administration", ""},
	{"(select count(*) from pgxlock_names)", "1", "monitoring administration", "application"},
	{"allow_rate('new', 0.001, 1)", "true", "application", ""},
	{"allow_rate('used', 0.001, 1)", "false", "application", "monitoring administration"}, // a look at the table is all it takes
	{"(select granted from reserve_rate('used', 0.001, 1))", "true", "application", "administration"},
	{"(select granted from pgxlock_limit_batch(1000000000, 1, '{new}', '{1}', '{0}', '{null}'))", "true", "application", ""},
	{"(select removed from pgxlock_reap_limits())", "1", "application administration", ""},
	{"pgxlock_limit_clock() is null", "false", "", "application monitoring administration none"},
	{"(select count(*) from pgxlock_limits)", "2", "monitoring administration", "application"},
	{"acquire_shared_lock('new', 'me')", "true", "application", ""},
	{"acquire_shared_lock('shared', 'me')", "true", "application", ""},
	{"acquire_shared_lock('held', 'me')", "false", "application", "monitoring administration"}, // a look at the table, as above
	{"(try_acquire_shared_lock('shared', 'me')).acquired", "true", "application", ""},
	{"extend_shared_lock('shared', 'reader')", "true", "application", "administration"},
	{"assert_shared_lock_held('shared', 'reader') > 0", "true", "application", "monitoring administration"},
	{"(select acquired from pgxlock_try_in_turn('{shared}', '{me}', '{1000}', '{null}', '{0}', true))", "true", "application", ""},
	{"pgxlock_renew_shares_batch('{shared}', '{reader}', '{null}', '{1000}')", "renewed", "application", "administration"},
	{"pgxlock_share_held('shared', 'other', 1, 'me', 1000)", "gone", "application", "monitoring administration"},
	{"(pgxlock_change_lease('shared', 'reader', 1, true, null, 1000, null)).outcome", "gone", "application", "monitoring administration"},
	{"pgxlock_release_shares_batch('{shared}', '{reader}', '{null}')", "released", "application", "administration"},
	{"(select holder from pgxlock_holders('shared'))", "reader", "application monitoring administration", ""},
	{"pgxlock_reap_shares('0 s')", "1", "application administration", ""},
	{"(pgxlock_lock_group('shared', true)).token > 0", "true", "", "application administration"},
	{"pgxlock_release_share('shared', 'reader', null, true)", "released", "", "application administration"},
	{"pgxlock_check_try('k', 'h', '1 s', '{}') is null", "false", "", "application monitoring administration none"},
	{"pgxlock_share_pin('k', 'h') is null", "false", "", "application monitoring administration none"},
	{"release_shared_lock('shared', 'reader')", "true", "application administration", ""},
	{"release_all_locks('reader')", "1", "application administration", ""},
	{"(select count(*) from lock_shares)", "2", "monitoring administration", ""},
	{"(select count(*) from distributed_lock_shares)", "2", "", "application monitoring administration"},
	{"release_lock('held', 'other')", "true", "application administration", ""},
	{"release_lock_fenced('held', 'other', 1)", "false", "application administration", "monitoring"},
	{"release_all_locks('other')", "1", "application administration", ""},
	{"reap_expired_locks('0')", "1", "application administration", ""},
	{"purge_claims('0')", "1", "administration", ""},
	{"repair_lock_tokens()", "false", "administration", "-"}, // not hardened: the owner's alone
	{"(select count(*) from lock_leases)", "3", "monitoring administration", ""},
	{"(select count(*) from pgxlock_claims)", "1", "monitoring administration", "application"},
	{"(select count(*) from distributed_locks)", "3", "", "application monitoring administration"},
	{"(select count(*) from pgxlock_epoch)", "1", "", "application"},
	{"(select count(*) from pgxlock_since_crash)", "1", "", "application"},
	{"(select count(*) from pgxlock_migrations)", "1", "", ""},
	{"(select count(*) from pgxlock_tokens)", "1", "", ""},
	{"nextval('pgxlock_tokens') is null", "false", "", "application"},
	{"pgxlock_next_tokens(1) is null", "false", "", "application monitoring administration none"},
	{"pgxlock_key('pin', 'k') is null", "false", "", "application monitoring administration none"},
	{"pgxlock_own_key(true, '') is null", "false", "application monitoring administration", "none"},
	{"pgxlock_is_own_key(1, 7)", "false", "monitoring administration", "application none"},
	{"(select count(*) from pgxlock_list_names())", "1", "monitoring administration", "application"},
	{"(select count(*) from pgxlock_list_tokens())", "0", "monitoring administration", "application"},
	{"(select count(*) from pgxlock_list_tickets())", "2", "monitoring administration", "application"},
	{"pgxlock_release('held', 'other', null)", "true", "", "application administration"},
	{"pgxlock_renew('held', 'other', null, '1 s') is null", "false", "", "application administration"},
	{"harden_locks() is null", "", "", ""},
	{"soften_locks() is null", "", "", ""},
	{"grant_locks(current_user::text, 'application') is null", "", "", ""},
	{"revoke_locks(current_user::text) is null", "", "", ""},
}

// forgeries write what no kind may write once it is hardened.
var forgeries = []string{
	"insert into distributed_locks (lock_name, holder_id, expires_at) values ('forged', 'me', 'infinity')",
	"update distributed_locks set holder_id = 'me'", "delete from distributed_locks", "truncate distributed_locks",
	"lock table distributed_locks in access exclusive mode",
	"update pgxlock_epoch set epoch_base = 0", "delete from pgxlock_claims where claim_key = 'x'",
	"insert into pgxlock_claims values ('forged', now(), null, '3')",
	"insert into pgxlock_migrations values (9, false)", "delete from pgxlock_advisory_locks",
	"insert into pgxlock_advisory_locks values (1, 1, 1, false, 1)", "insert into distributed_lock_shares values ('shared', 'me', 1, now(), 'infinity', '{}')",
	"update distributed_lock_shares set holder_id = 'me'", "delete from distributed_lock_shares", "drop view lock_shares", "drop view lock_holders", "drop view lock_waiters", "delete from pgxlock_limits", "update pgxlock_limits set tat = 0",
	"insert into pgxlock_limits values ('k', 0)", "delete from pgxlock_waiters", "update pgxlock_waiters set woken = null",
	"delete from pgxlock_step_down", "delete from pgxlock_semaphores", "insert into pgxlock_step_down values (0, 'held', 'other', now(), '', '')",
	"insert into pgxlock_waiters values (0, 'k', -1, null, '', 1, now(), 'infinity')", "select setval('pgxlock_tickets', 1)",
	"delete from pgxlock_runs", "update pgxlock_runs set state = 'failed'",
	"delete from pgxlock_evictions", "insert into pgxlock_evictions values (0, 'k', 'h', 1, now(), 'me', '')", "insert into pgxlock_names values (1, 'k', now())", "delete from pgxlock_names",
	"insert into pgxlock_runs values ('k', now(), 'running', 1, 'me', null, now(), null, null, 'infinity')",
	"select setval('pgxlock_tokens', 1)", "alter table distributed_locks disable trigger all",
	"create trigger t before insert on distributed_locks for each row execute function suppress_redundant_updates_trigger()",
	"create table open.mine (n varchar(255) references distributed_locks on delete cascade)",
	"alter function acquire_lock security invoker", "drop view lock_leases", "create policy p on distributed_locks",
}

func TestEachKindOfRoleMayDoItsWorkAndNothingElse(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.do("create schema open; grant all on schema open to public")
	check := func(hardened bool, roles []string) {
		t.Helper()
		for i, kind := range append(slices.Clone(kinds), "none") {
			if testing.Short() && (!hardened || kind != "application") {
				continue
			}
			s := d.as(roles[i])
			d.do(`delete from distributed_locks; delete from distributed_lock_shares; delete from pgxlock_claims; select acquire_lock('held', 'other', 3600), acquire_lock('old', 'another'), claim_once('done');
				select acquire_shared_lock('shared', 'reader', 3600), acquire_shared_lock('shared', 'crashed');
				update distributed_lock_shares set expires_at = clock_timestamp() - interval '1 s' where holder_id = 'crashed';
				delete from pgxlock_waiters; insert into pgxlock_waiters values (0, 'queue', -5, null, '', 1, now(), 'infinity'), (0, 'gone', -6, null, '', 1, now(), now());
				delete from pgxlock_step_down; delete from pgxlock_semaphores; insert into pgxlock_semaphores values ('s', 1, now(), 'me');
				insert into pgxlock_step_down values (0, 'held', 'other', now(), 'me', '');
				delete from pgxlock_evictions; insert into pgxlock_evictions values (0, 'k', 'h', 1, now(), 'me', 'why');
				delete from pgxlock_names; insert into pgxlock_names values (1, 'k', now());
				delete from pgxlock_runs; select start_run('started', '36500 days');
				insert into pgxlock_runs values ('ended', '2026-01-01 00:00+00', 'succeeded', 1, 'x', null, now(), now(), null, 'infinity');
				delete from pgxlock_limits; insert into pgxlock_limits values ('used', pgxlock_limit_clock() + 1000000000000), ('idle', 0)`)
			d.expire("old")
			for _, e := range everything { // each is rolled back
				allowed := e.kinds
				if !hardened {
					allowed += " " + e.soft
				}
				want := "42501"
				if slices.Contains(strings.Fields(allowed), kind) && !strings.Contains(e.soft, "-") || hardened && slices.Contains(strings.Fields(e.kinds), kind) {
					want = e.want
				}
				s.do("begin")
				if got := s.outcome(e.expression); got != want {
					t.Errorf("hardened %t, %s: %s: got %s, want %s", hardened, kind, e.expression, got, want)
				}
				s.rollback()
			}
			if !hardened {
				continue
			}
			for _, forgery := range forgeries {
				if code := outcome("", s.run("begin; "+forgery)); code != "42501" {
					t.Errorf("%s: %s: %s", kind, forgery, code)
				}
				s.rollback()
			}
		}
	}
	roles := make([]string, 0, 4)
	for _, kind := range kinds {
		roles = append(roles, d.role())
		d.do(fmt.Sprintf("select grant_locks('%s', '%s')", roles[len(roles)-1], kind))
	}
	roles = append(roles, d.role())
	check(false, roles)

	d.do("select harden_locks()")
	for _, role := range roles { // what it was before does not tell what is meant
		d.as(role).want("advisory_lock_key('k')", "42501")
	}
	for i, kind := range kinds {
		d.do(fmt.Sprintf("select grant_locks('%s', '%s')", roles[i], kind))
	}
	check(true, roles)
	if testing.Short() {
		return
	}
	d.do("select harden_locks()") // again: all keep what they are
	check(true, roles)
	d.do("select soften_locks()")
	check(false, roles)

	d.do("select harden_locks()")
	for i, kind := range kinds {
		d.do(fmt.Sprintf("select grant_locks('%s', '%s'), revoke_locks('%s')", roles[i], kind, roles[i]))
		d.as(roles[i]).want("advisory_lock_key('k')", "42501")
	}
}

// Default privileges, grants by hand, of columns, and those that others passed on.
func TestHardeningTakesEveryRightThatWasGivenOtherwise(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	a, b := d.role(), d.role()
	d.do(fmt.Sprintf(`grant all on distributed_locks, pgxlock_epoch, pgxlock_migrations to %s with grant option; grant all on all functions in schema public to %[1]s;
		grant all on sequence pgxlock_tokens to %[1]s; grant select, update (holder_id) on distributed_locks to %s; grant insert (claim_key) on pgxlock_claims to public;
		set role %[1]s; grant update on distributed_locks to %[2]s; reset role`, a, b))
	const rights = `select count(*) from pgxlock_grants()`
	for range 2 {
		d.do("select harden_locks()")
		d.want(rights, "0")
		d.want("select count(*) from pg_attribute a, aclexplode(a.attacl) where a.attrelid in ('distributed_locks'::regclass, 'pgxlock_claims'::regclass)", "0")
		d.want("select count(*) from pg_class c, aclexplode(c.relacl) x where c.relnamespace = 'public'::regnamespace and x.grantee <> c.relowner", "0")
		d.do("grant execute on function pgxlock_next_tokens(bigint) to " + a + "; grant update on distributed_locks to " + b + "; grant select on pgxlock_epoch to public")
		d.want(rights, "3")
	}
	d.do("select harden_locks(), soften_locks()")
	d.want(rights+" where grantee <> 'PUBLIC' or privilege <> 'EXECUTE'", "0")
	// A stranger's function of our prefix is none of ours.
	d.do("create function pgxlock_theirs() returns int language sql as 'select 1'; alter function pgxlock_theirs owner to " + a)
	d.do("select harden_locks()")
	d.as(b).want("pgxlock_theirs()", "1")
}

func TestOnlyTheOwnerChangesRights(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	owner, member, stranger := d.role(), d.role(), d.role()
	d.do(fmt.Sprintf("create schema theirs; alter schema theirs owner to %s; grant usage on schema theirs to public; grant %[1]s to %s", owner, member))
	up := d.as(owner)
	up.do("set search_path = theirs")
	for _, file := range upFiles(t) {
		up.do(file)
	}
	for _, role := range []string{owner, member} {
		for _, call := range []string{"harden_locks()", "grant_locks('" + stranger + "', 'monitoring')", "revoke_locks('" + stranger + "')", "soften_locks()"} {
			if s := d.as(role); s.run("select theirs."+call) != nil {
				t.Errorf("%s: %v", call, s.run("select theirs."+call))
			}
			d.as(stranger).want("theirs."+call, "42501")
		}
	}
	d.want("theirs.grant_locks('nobody-like-this', 'application')", "42704")
	d.want("theirs.grant_locks('public', 'application')", "42704")
	d.want("theirs.grant_locks(null, 'application')", "42704")
	d.want("theirs.revoke_locks('nobody-like-this')", "42704")
	for _, kind := range []string{"null", "''", "'superuser'", "'Application'"} {
		d.want("theirs.grant_locks('"+stranger+"', "+kind+")", "22023")
	}
}

// What others can make in the schema or on the tables would run as the owner.
func TestHardeningRefusesWhereOthersCouldGetTheOwnersRights(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	role := d.role()
	refused := func(make, undo, says string) {
		t.Helper()
		d.do(make)
		err := d.run("select harden_locks()")
		if outcome("", err) != "55000" || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", make, err)
		}
		d.want("pgxlock_hardened()", "false")
		d.do(undo)
	}
	refused("grant create on schema public to "+role, "revoke create on schema public from "+role, role)
	refused("grant create on schema public to public", "revoke create on schema public from public", ": PUBLIC")
	group := d.role()
	refused("grant create on schema public to "+group+"; grant "+group+" to "+role, "revoke "+group+" from "+role+"; revoke create on schema public from "+group, role)
	// The rights to make these are given with GRANT ALL.
	refused("grant trigger on distributed_locks to "+role+"; create function run() returns trigger language plpgsql as 'begin return new; end'; set role "+role+
		"; create trigger late after delete on distributed_locks execute function run(); reset role",
		"drop function run() cascade", "trigger late on table distributed_locks")
	refused("grant references on pgxlock_claims to "+role+"; create schema theirs authorization "+role+"; set role "+role+
		"; create table theirs.child (k varchar(255) constraint falls references pgxlock_claims on delete cascade); reset role",
		"drop schema theirs cascade", "constraint falls on table theirs.child")
	d.do("select harden_locks()")
	d.want("pgxlock_hardened()", "true")
}

// A role that runs the functions with the owner's rights tries to have its own
// code run, and to have them look at its own tables.
func TestApplicationGetsNothingOfTheOwnersRights(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	role := d.harden("application")[0]
	d.do("grant create, temporary on database " + d.get("quote_ident(current_database())") + " to " + role)
	s := d.as(role)
	s.do(`create schema mine; create table mine.ran (who name);
		create function mine.run() returns trigger language plpgsql as $$ begin insert into mine.ran values (current_user); return new; end $$;
		create function mine.note() returns boolean language plpgsql as $$ begin insert into mine.ran values (current_user); return true; end $$;
		create domain mine.text as pg_catalog.text check (mine.note());
		create function mine.same(pg_catalog.text, pg_catalog.text) returns boolean language sql as 'select mine.note()';
		create operator mine.= (leftarg = pg_catalog.text, rightarg = pg_catalog.text, function = mine.same);
		create function mine.clock_timestamp() returns timestamptz language sql as $$ select mine.note(); select 'infinity'::timestamptz $$;
		create function mine.pgxlock_check(pg_catalog.text, pg_catalog.text) returns void language sql as 'select mine.note()';
		create function mine.pgxlock_next_tokens(bigint) returns bigint[] language sql as 'select mine.note(); select array[1::bigint]'`)
	for _, schema := range []string{"mine", "pg_temp"} {
		for _, table := range []string{"distributed_locks", "pgxlock_claims", "pgxlock_epoch", "lock_leases"} {
			columns := map[string]string{
				"pgxlock_claims": "claim_key varchar(255) primary key, claimed_at timestamptz, expires_at timestamptz, claimed_by xid8",
				"pgxlock_epoch":  "singleton boolean, system_identifier bigint, epoch_base bigint, timeline bigint",
			}[table]
			if columns == "" {
				columns = "lock_name varchar(255) primary key, holder_id varchar(255), acquired_at timestamptz, expires_at timestamptz, metadata jsonb, fencing_token bigint, state text"
			}
			s.do(fmt.Sprintf("create table %s.%s (%s); create trigger t before insert or update or delete on %[1]s.%[2]s for each row execute function mine.run()", schema, table, columns))
		}
		s.do("create sequence " + schema + ".pgxlock_tokens")
	}
	for _, path := range []string{"mine, pg_temp, pg_catalog, public", "pg_temp, mine, public, pg_catalog", "public, mine"} {
		s.do("set search_path = " + path)
		for _, c := range []struct{ expression, want string }{
			{"public.acquire_lock('k', 'me', 60, '{}'::pg_catalog.jsonb)", "true"},
			{"public.acquire_lock('k', 'you', 60, '{}'::pg_catalog.jsonb)", "false"},
			{"public.extend_lock('k', 'me', 60)", "true"},
			{"(select array_agg(token is not null) from public.pgxlock_acquire_batch('{k,n}', '{you,me}', '{60000,60000}', '{null,\"{}\"}', '{null,null}') b, unnest(b.tokens) token)", "{f,t}"},
			{"public.release_lock('n', 'me')", "true"},
			{"public.assert_lock_held('k', 'me') is null", "false"},
			{"(select h.holder from public.pgxlock_holders('k') h)", "me"},
			{"(select public.pgxlock_renew_batch('{k}', '{me}', array[(select h.fencing_token from public.pgxlock_holders('k') h)], '{60000}'))", "renewed"},
			{"public.pgxlock_release_batch('{k}', '{me}', '{null}')", "r"},
			{"(select b.token is not null from public.pgxlock_acquire_one('k', 'me', 60000, null, null) b)", "true"},
			{"public.pgxlock_release_one('k', 'me', null)", "r"},
			{"public.claim_once('claim ' || pg_catalog.current_setting('search_path'))", "true"},
			{"public.claim_once('claim ' || pg_catalog.current_setting('search_path'))", "false"},
			{"public.lock_tx('k', '1 s')", "true"},
			{"public.reap_expired_locks('1 hour')", "0"},
		} {
			s.want(c.expression, c.want)
		}
	}
	d.want("select count(*) from pgxlock_claims", "3")
	d.want("select count(*) from distributed_locks", "0")
	// It does run for the role that calls it, and for no other.
	s.do("insert into mine.distributed_locks (lock_name) values ('k')")
	d.want("select string_agg(distinct who::text, ' ') from mine.ran", role)
	d.do("drop schema mine cascade")
}

// A policy that hides rows would let a try be granted in the dark: every way that
// looks at a table says so instead, by the server's own error.
func TestRowLevelSecurityIsNoticed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	owner, seed := d.role(), d.role()
	d.do(fmt.Sprintf("create schema locks authorization %s; grant usage on schema locks to %s", owner, seed))
	up := d.as(owner)
	up.do("set search_path = locks")
	for _, file := range upFiles(t) {
		up.do(file)
	}
	up.do("select acquire_lock('held', 'other', 600), claim_once('done'); grant usage on sequence pgxlock_tickets to " + seed + "; grant select, insert, update, delete on distributed_locks, pgxlock_claims, pgxlock_advisory_locks, pgxlock_waiters, pgxlock_step_down, pgxlock_semaphores, pgxlock_limits, pgxlock_runs, pgxlock_evictions, pgxlock_names, distributed_lock_shares to " + seed)
	s := d.as(seed)
	s.do("set search_path = locks")
	calls := []string{
		"acquire_lock('held', 'me')", "acquire_lock('new', 'me')", "(acquire_in_turn('held', 'me')).acquired", "(acquire_shared_in_turn('shared', 'me')).acquired", "(acquire_permits_in_turn('jobs', 'me', 1)).acquired", "leave_queue('k', 'me')", "(try_acquire_lock('held', 'me')).acquired", "extend_lock('held', 'other')",
		"renew_lock('held', 'other', 1)", "release_lock('held', 'other')", "release_lock_fenced('held', 'other', 1)", "release_all_locks('other')",
		"assert_lock_held('held', 'other')", "reap_expired_locks()", "(select count(*) from pgxlock_holders('held'))",
		"pgxlock_acquire_batch('{held}', '{me}', '{1}', '{null}', '{null}')", "pgxlock_acquire_batch('{new}', '{me}', '{1}', '{null}', '{null}')",
		"pgxlock_renew_batch('{held}', '{other}', '{1}', '{1}')", "pgxlock_release_batch('{held}', '{other}', '{1}')",
		"pgxlock_acquire_one('held', 'me', 1, null, null)", "pgxlock_acquire_one('new', 'me', 1, null, null)", "pgxlock_release_one('held', 'other', 1)",
		"claim_once('done')", "claim_once('new')", "claim_once('new', '1 s')", "purge_claims('1 hour')",
		"pgxlock_advisory_batch('{0}', '{1}', pg_backend_pid())", "assert_advisory_lock_held(1, 1, 1, 1)", "pgxlock_reap_advisory()",
		"(select count(*) from pgxlock_publish_batch('{0}', '{k}', '{null}', '{1}', '{null}', 7, 'me', 1000, 1))", "(select count(*) from pgxlock_acquire_batch('{new}', '{me}', '{1000}', '{null}', '{0}'))",
		"(select count(*) from pgxlock_wake_batch('{0}', '{k}', '{null}'))", "wake_lock_waiter('k')", "pgxlock_withdraw_batch('{0}', '{k}', '{1}')", "pgxlock_refused_batch('{1}', '{7}', '{1}')", "pgxlock_waited_for('{1}', '{7}')", "pgxlock_reap_waiters()",
		"allow_rate('k', 1, 1)", "(select granted from reserve_rate('used', 1, 1))", "(select granted from pgxlock_limit_batch(1000, 1, '{k}', '{1}', '{0}', '{null}'))", "(select removed from pgxlock_reap_limits())",
		"start_run('daily', '1 day')", "start_run_at('k', now())", "finish_run('k', now())", "forget_run('k', now())", "(select count(*) from pgxlock_due_runs('k', '1 h', '0', 'UTC', 0, false))",
		"(select count(*) from pgxlock_start_run('k', now(), null, null, null, '1 day', 'me', null))", "pgxlock_finish_run('k', now(), 'me', 'succeeded', null)",
		"evict_lock('held', 'other', 1, 'why')", "pgxlock_publish_names('{k}')", "(select count(*) from pgxlock_evicted('{0}', '{k}', '{h}', '{1}'))",
		"acquire_shared_lock('new', 'me')", "acquire_shared_lock('held', 'me')", "acquire_shared_lock('shared', 'me')", "extend_shared_lock('shared', 'me')", "release_shared_lock('shared', 'me')",
		"assert_shared_lock_held('shared', 'me')", "pgxlock_reap_shares()", "(select count(*) from pgxlock_holders('shared'))",
		"(select count(*) from pgxlock_try_in_turn('{new}', '{me}', '{1000}', '{null}', '{0}', true))", "pgxlock_renew_shares_batch('{shared}', '{me}', '{1}', '{1}')", "(pgxlock_change_lease('shared', 'me', 1, true, null, 1, null)).outcome", "pgxlock_share_held('held', 'other', 1, 'me', 1000)", "pgxlock_release_shares_batch('{shared}', '{me}', '{1}')",
	}
	all := func(who *session, want string) {
		t.Helper()
		for _, call := range calls {
			who.do("begin")
			if got := who.outcome(call); (got == "42501") != (want == "42501") {
				t.Errorf("%s: got %s, want %s", call, got, want)
			}
			who.rollback()
		}
	}
	all(s, "its answer")
	up.do("alter table distributed_locks enable row level security; alter table pgxlock_claims enable row level security; alter table pgxlock_advisory_locks enable row level security; alter table pgxlock_waiters enable row level security; alter table pgxlock_limits enable row level security; alter table pgxlock_runs enable row level security; alter table pgxlock_evictions enable row level security; alter table pgxlock_names enable row level security; alter table distributed_lock_shares enable row level security")
	all(s, "42501")
	all(up, "its answer") // the owner, whom it does not concern
	up.do("create policy part on distributed_locks using (lock_name <> 'held'); create policy part on pgxlock_claims using (claim_key <> 'done'); create policy part on pgxlock_advisory_locks using (shared); create policy part on pgxlock_waiters using (waiters > 1); create policy part on pgxlock_limits using (tat > 7); create policy part on pgxlock_runs using (attempt > 1); create policy part on distributed_lock_shares using (fencing_token > 1)")
	all(s, "42501")
	s.do("set row_security = on")
	all(s, "42501")

	// Hardened, it concerns nobody but who reads the table itself.
	up.do(fmt.Sprintf("select harden_locks(), grant_locks('%s', 'application'), grant_locks('%[1]s', 'administration')", seed))
	all(s, "its answer")
	up.do("alter table distributed_locks force row level security; alter table pgxlock_claims force row level security; alter table pgxlock_advisory_locks force row level security; alter table pgxlock_waiters force row level security; alter table pgxlock_limits force row level security; alter table pgxlock_runs force row level security; alter table pgxlock_evictions force row level security; alter table pgxlock_names force row level security; alter table distributed_lock_shares force row level security")
	all(s, "42501")
	all(up, "42501")
	up.want("repair_lock_tokens()", "42501")
	up.do("alter table distributed_locks no force row level security; alter table pgxlock_claims no force row level security; alter table pgxlock_advisory_locks no force row level security; alter table pgxlock_waiters no force row level security; alter table pgxlock_limits no force row level security; alter table pgxlock_runs no force row level security; alter table pgxlock_evictions no force row level security; alter table pgxlock_names no force row level security; alter table distributed_lock_shares no force row level security; alter table pgxlock_epoch enable row level security, force row level security")
	s.want("acquire_lock('new', 'me')", "42501")
	d.do("drop schema locks cascade")
}

// A role that has nothing of ours can still lock numbers: it holds others up, and
// gets nothing.
func TestStrangersAdvisoryLocksBlockAndGrantNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	role := d.harden("application")[0]
	s := d.as(role)
	s.do("select acquire_lock('k', 'A')")
	stranger := d.as(d.role())
	stranger.want("acquire_lock('k', 'B')", "42501")
	for _, space := range []string{"pin", "guard"} {
		key := d.get("pgxlock_key('"+space+"', 'k')") + "::bigint"
		stranger.do("select pg_advisory_lock(" + key + ")")
		s.want("acquire_lock('k', 'B')", "false")
		s.want("extend_lock('k', 'A')", "true")
		stranger.do("select pg_advisory_unlock(" + key + "); select pg_advisory_lock_shared(" + key + ")")
		s.want("acquire_lock('k', 'B')", "false")
		stranger.do("select pg_advisory_unlock_all()")
	}
	s.want("assert_lock_held('k', 'A') > 0", "true")
	s.want("release_lock('k', 'A')", "true")
}
