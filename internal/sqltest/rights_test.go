// Attacks on the change of rights itself: by a role that prepares for harden_locks(), or races
// with it, to keep a right or to have code of its own run with the owner's.

package sqltest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// wantRefused wants harden_locks() to refuse, and to name the reason.
func (d *database) wantRefused(s *session, state, says string) {
	d.t.Helper()
	err := s.run("select harden_locks()")
	if outcome("", err) != state || !strings.Contains(fmt.Sprint(err), says) {
		d.t.Errorf("%v, want %s with %q", err, state, says)
	}
	d.want("pgxlock_hardened()", "false")
}

// A trigger that is not committed yet is not seen, and REVOKE does not wait for it
// where the table had one before.
func TestHardeningWaitsForATriggerInTheMaking(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, make := range []string{
		"create trigger late before insert on public.distributed_locks for each row execute function theirs.run()",
		"create table theirs.child (k varchar(255) constraint late references public.pgxlock_claims)",
		"create trigger late before insert on public.pgxlock_advisory_locks for each row execute function theirs.run()",
		"create trigger late before insert on public.pgxlock_limits for each row execute function theirs.run()",
		"create trigger late before insert on public.pgxlock_waiters for each row execute function theirs.run()",
		"create trigger late before insert on public.pgxlock_runs for each row execute function theirs.run()",
		"create trigger late before insert on public.pgxlock_evictions for each row execute function theirs.run()",
		"create trigger late before insert on public.pgxlock_names for each row execute function theirs.run()",
		"create trigger late before insert on public.distributed_lock_shares for each row execute function theirs.run()",
	} {
		d := install(t)
		evil := d.role()
		d.do(fmt.Sprintf("grant trigger on distributed_locks, pgxlock_advisory_locks, pgxlock_waiters, pgxlock_step_down, pgxlock_semaphores, pgxlock_limits, pgxlock_runs, pgxlock_evictions, pgxlock_names, distributed_lock_shares to %s; grant references on pgxlock_claims to %[1]s; create schema theirs authorization %[1]s", evil))
		s := d.as(evil)
		const before = "create function theirs.run() returns trigger language plpgsql as 'begin return new; end'"
		s.do(before + "; create trigger early before insert on public.distributed_locks for each row execute function theirs.run(); drop function theirs.run() cascade")
		s.do(before)
		s.do("begin")
		s.do(make)
		hardening := d.connect().start("harden_locks()")
		hardening.waitsFor(s)
		s.do("commit")
		hardening.want("55000")
		d.want("pgxlock_hardened()", "false")
	}
}

// A right on a column that a role passed on because it had it on the table does
// not go with that.
func TestColumnRightsDoNotOutlastTheirGrantor(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	evil, accomplice := d.role(), d.role()
	for _, to := range []string{evil, accomplice} {
		for _, take := range []string{"select harden_locks()", "select revoke_locks('" + evil + "'), revoke_locks('" + accomplice + "')"} {
			d.do("grant update, select on distributed_locks to " + evil + " with grant option")
			d.as(evil).do("grant update (holder_id, expires_at), select (lock_name) on public.distributed_locks to " + to)
			d.do(take)
			d.want("select count(*) from pgxlock_grants() where object = 'TABLE distributed_locks'", "0")
			d.as(to).want("(select count(lock_name) from distributed_locks)", "42501")
			d.do("select soften_locks()")
		}
	}
}

func TestRightsAreNotChangedOnAnOldSnapshot(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	role := d.role()
	for _, level := range []string{"repeatable read", "serializable"} {
		for _, call := range []string{"harden_locks()", "soften_locks()", "grant_locks('" + role + "', 'application')", "revoke_locks('" + role + "')"} {
			s := d.begin(level)
			s.want(call, "25001")
			s.done()
		}
	}
}

// Who owns a table makes triggers on it; who owns a function, or the schema,
// replaces it. All of these would run for others.
func TestHardeningWantsOneOwner(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, object := range []string{"table distributed_locks", "table pgxlock_claims", "table pgxlock_advisory_locks", "table pgxlock_waiters", "table pgxlock_limits", "table pgxlock_runs", "sequence pgxlock_tickets", "view lock_leases", "table distributed_lock_shares", "view lock_shares", "view lock_holders", "view lock_waiters", "function pgxlock_check(text, text)", "function claim_once"} {
		d := install(t)
		d.do("alter " + object + " owner to " + d.role())
		d.wantRefused(d.session, "55000", "not all objects belong to")
	}
	d := install(t)
	owner := d.role()
	d.do("create schema theirs; grant create on schema theirs to " + owner + "; alter schema theirs owner to " + owner)
	d.as(owner).do("revoke create on schema theirs from " + owner)
	d.do("set search_path = theirs")
	for _, file := range upFiles(t) {
		d.do(file)
	}
	d.want("theirs.harden_locks()", "55000")
}

func TestSofteningTakesNothingWhereNothingIsHard(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	old, application := d.role(), d.role()
	d.do("grant select, insert, update, delete on distributed_locks to " + old + "; select soften_locks()")
	d.as(old).want("acquire_lock('k', 'me')", "true")
	d.do("select harden_locks(), grant_locks('" + application + "', 'application'), soften_locks(), soften_locks()")
	d.as(application).want("acquire_lock('x', 'me')", "true")
}

// Some rights of a kind are not the kind: to harden again gives no more.
func TestHardeningAgainGivesNobodyMore(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("select harden_locks()")
	for _, right := range []string{
		"execute on function repair_lock_tokens()", "select on lock_leases", "execute on function pgxlock_renew_batch(text[], text[], bigint[], bigint[])",
		"execute on function try_acquire_lock(varchar, varchar, interval, jsonb), claim_once(text, interval, interval)", "execute on function purge_claims, evict_lock",
		"select on all tables in schema public", "execute on function pgxlock_session_key, pgxlock_is_own_key",
	} {
		role := d.role()
		d.do("grant " + right + " to " + role + "; select harden_locks()")
		d.want("select count(*) from pgxlock_grants() where grantee = '"+role+"'", "0")
	}
	// And all of a kind are, whatever the session says of identifiers.
	role := d.role()
	d.do("select grant_locks('" + role + "', 'monitoring'); set quote_all_identifiers = on; select harden_locks(); reset quote_all_identifiers")
	d.as(role).want("(select count(*) from lock_leases)", "0")
}

func TestBatchTakesWhatSingleCallsTake(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	token := d.token("k", "me")
	for _, ttl := range []string{"-1", "0", "9000000000000000"} {
		d.want(fmt.Sprintf("(select string_agg(r, ',') from pgxlock_renew_batch('{k}', '{me}', '{%d}', '{%s}') r)", token, ttl), "skipped")
	}
	d.want("acquire_lock('k', 'other')", "false")
	d.do("insert into distributed_locks (lock_name, holder_id, expires_at, fencing_token) values ('r', '*maintenance', 'infinity', 7)")
	d.want("(select string_agg(r, ',') from pgxlock_renew_batch('{r}', '{*maintenance}', '{7}', '{1000}') r)", "skipped")
	d.want("pgxlock_release_batch('{r}', '{*maintenance}', '{7}')", "g")
	d.want("select count(*) from distributed_locks where lock_name = 'r'", "1")
}
