// Schemas in which other roles may create: nothing of theirs may run in our functions and
// files, nor change what they return.

package migrations_test

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	mathrand "math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// goodAndBadCalls calls every public function through good and bad paths. The
// arguments have their types, as those of drivers have: who may create
// functions may add acquire_lock(text, ...), and a bare literal would rather be
// text.
func goodAndBadCalls(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	check(t, conn, []trial{
		{"acquire_lock('k'::varchar, 'a'::varchar, 60, '{}'::jsonb)", "true"},
		{"acquire_lock('k'::varchar, 'b'::varchar, 60, '{}'::jsonb)", "false"},
		{"acquire_lock('k'::varchar, 'a'::varchar, 60, '{\"n\": 1}'::jsonb)", "true"},
		{"(try_acquire_lock('k'::varchar, 'b'::varchar, '1 minute'::interval, '{}'::jsonb)).held_by::text", "a"},
		{"(try_acquire_lock('k'::varchar, 'a'::varchar, '1 minute'::interval, '{}'::jsonb)).acquired", "true"},
		{"extend_lock('k'::varchar, 'a'::varchar, 60)", "true"},
		{"extend_lock('k'::varchar, 'b'::varchar, 60)", "false"},
		{"renew_lock('k'::varchar, 'a'::varchar, (select h.fencing_token from pgxlock_holders('k'::text) h), '1 minute'::interval) is null", "false"},
		{"renew_lock('k'::varchar, 'a'::varchar, 1::bigint, '1 minute'::interval) is null", "true"},
		{"(select string_agg(b, ','::text) from pgxlock_renew_batch('{k,k}'::text[], '{a,b}'::text[], array[(select h.fencing_token from pgxlock_holders('k'::text) h), 1::bigint], '{60000,60000}'::bigint[]) b)", "renewed,gone"},
		{"pgxlock_release_batch('{k,free}'::text[], '{b,a}'::text[], array[null, null]::bigint[])", "gg"},
		{"assert_lock_held('k'::varchar, 'a'::varchar, null::bigint, false) is null", "false"},
		{"assert_lock_held('k'::varchar, 'b'::varchar, null::bigint, false)", "LK001"},
		{"assert_lock_held('k'::varchar, 'a'::varchar, 1::bigint, true)", "LK001"},
		{"assert_lock_held('free'::varchar, 'a'::varchar, null::bigint, true)", "LK001 LK002"}, // 2: where the snapshot is older
		{"release_lock_fenced('k'::varchar, 'a'::varchar, 1::bigint)", "false"},
		{"release_lock('k'::varchar, 'b'::varchar)", "false"},
		{"release_lock('k'::varchar, 'a'::varchar)", "true"},
		{"acquire_lock('batch'::varchar, 'a'::varchar, 60, to_jsonb('m'::text))", "true"},
		{"(select h.metadata from pgxlock_holders('batch'::text) h)", "m"},
		{"pgxlock_release_batch('{batch}'::text[], '{a}'::text[], array[null]::bigint[])", "r"},
		{"pgxlock_release_one('batch'::text, 'a'::text, null::bigint)", "g G"}, // above READ COMMITTED others may wait
		{"acquire_lock('alone'::varchar, 'a'::varchar, 60, '{}'::jsonb)", "true"},
		{"pgxlock_release_one('alone'::text, 'a'::text, null::bigint)", "r R"},
		{"(try_acquire_lock('expiring'::varchar, 'a'::varchar, '1 microsecond'::interval, '{}'::jsonb)).acquired", "true"},
		{"(try_acquire_lock('expiring'::varchar, 'b'::varchar, '1 microsecond'::interval, '{}'::jsonb)).acquired", "true"}, // a take-over
		{"reap_expired_locks('0'::interval, 1000) >= 1", "true"},
		{"acquire_lock('one'::varchar, 'all'::varchar, 60, '{}'::jsonb) and acquire_lock('two'::varchar, 'all'::varchar, 60, '{}'::jsonb)", "true"},
		{"release_all_locks('all'::varchar)", "2"},
		{"advisory_lock_key('invoice:42'::text)", "6688477336110245193"},
		{"acquire_lock(null::varchar, 'a'::varchar, 60, '{}'::jsonb)", pgerrcode.InvalidParameterValue},
		{"acquire_lock(''::varchar, 'a'::varchar, 60, '{}'::jsonb)", pgerrcode.InvalidParameterValue},
		{"acquire_lock('k'::varchar, repeat('h', 256)::varchar, 60, '{}'::jsonb)", pgerrcode.InvalidParameterValue},
		{"acquire_lock('k'::varchar, '*h'::varchar, 60, '{}'::jsonb)", pgerrcode.InvalidParameterValue},
		{"acquire_lock('k'::varchar, 'h'::varchar, 0, '{}'::jsonb)", pgerrcode.InvalidParameterValue},
		{"acquire_lock('k'::varchar, 'h'::varchar, null::integer, '{}'::jsonb)", pgerrcode.InvalidParameterValue},
		{"acquire_lock('k'::varchar, 'h'::varchar, 60, to_jsonb(repeat('m', 70000)))", pgerrcode.InvalidParameterValue},
		{"extend_lock('k'::varchar, 'h'::varchar, -1)", pgerrcode.InvalidParameterValue},
		{"renew_lock('k'::varchar, 'h'::varchar, null::bigint, '1 minute'::interval)", pgerrcode.InvalidParameterValue},
		{"reap_expired_locks('-1 s'::interval, 1)", pgerrcode.InvalidParameterValue},
		{"reap_expired_locks('1 s'::interval, 0)", pgerrcode.InvalidParameterValue},
		{"release_all_locks(''::varchar)", pgerrcode.InvalidParameterValue},
	})
}

// trial is an expression and what is wanted of it: a value, or a SQLSTATE, or one
// of several with blanks between them.
type trial struct{ query, want string }

func check(t *testing.T, conn *pgx.Conn, trials []trial) {
	t.Helper()
	for _, call := range trials {
		var got *string
		err := conn.QueryRow(t.Context(), "select ("+call.query+")::text", pgx.QueryExecModeExec).Scan(&got)
		var pgErr *pgconn.PgError
		switch {
		case errors.As(err, &pgErr):
			if !slices.Contains(strings.Fields(call.want), pgErr.Code) {
				t.Errorf("%s: %s %s, want %s", call.query, pgErr.Code, pgErr.Message, call.want)
			}
		case err != nil:
			t.Fatalf("%s: %v", call.query, err)
		case got == nil || !slices.Contains(strings.Fields(call.want), *got):
			t.Errorf("%s: not %s", call.query, call.want)
		}
	}
}

// callsInTransactions is the same for what runs in the caller's transaction.
// The answers that depend on what other databases of the server do at that
// moment are in there twice.
func callsInTransactions(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	key := "'" + rand.Text() + "'" // claims stay
	check(t, conn, []trial{
		{"lock_tx('k'::text, null::interval, false, true)", "true"},
		{"lock_tx('k'::text, null::interval, true, true)", "true"},
		{"lock_tx('k'::text, '0'::interval, false, true)", "true"},
		{"lock_tx('k'::text, '1 minute'::interval, false, false)", "true LK002"}, // 2: where the snapshot is older
		{"lock_tx(null::text, null::interval, false, true)", pgerrcode.InvalidParameterValue},
		{"lock_tx(repeat('k', 256), null::interval, false, true)", pgerrcode.InvalidParameterValue},
		{"lock_tx('k'::text, null::interval, null::boolean, true)", pgerrcode.InvalidParameterValue},
		{"claim_once(" + key + "::text, null::interval, null::interval)", "true"},
		{"claim_once(" + key + "::text, null::interval, null::interval)", "false"},
		{"claim_once(" + key + "::text, '0'::interval, null::interval)", "false"},
		{"claim_once(('bounded ' || " + key + ")::text, '1 minute'::interval, '1 microsecond'::interval)", "true"},
		{"claim_once(('bounded ' || " + key + ")::text, '1 minute'::interval, '1 microsecond'::interval)", "true"}, // a take-over
		{"claim_once(''::text, null::interval, null::interval)", pgerrcode.InvalidParameterValue},
		{"claim_once('k'::text, null::interval, '0'::interval)", pgerrcode.InvalidParameterValue},
		{"(claim_request(" + key + "::text, 'f'::text, '1 minute'::interval, null::interval)).outcome", "other"},
		{"(claim_request(('asked ' || " + key + ")::text, ''::text, null::interval, null::interval)).outcome", pgerrcode.InvalidParameterValue},
		{"answer_request(" + key + "::text, 'f'::text, 'a'::bytea) is null", pgerrcode.ObjectNotInPrerequisiteState},
		{"answer_request(" + key + "::text, 'f'::text, null::bytea) is null", pgerrcode.InvalidParameterValue},
		{"purge_claims('0'::interval, 10000) >= 2", "true"},
		{"purge_claims('-1 s'::interval, 1)", pgerrcode.InvalidParameterValue},
		{"purge_claims('1 s'::interval, 0)", pgerrcode.InvalidParameterValue},
	})
	// The waits: somebody else has it.
	other, err := pgx.ConnectConfig(t.Context(), conn.Config())
	must(t, err)
	defer other.Close(t.Context())
	for _, query := range []string{"begin", "select lock_tx('k'::text, null::interval, true, true), claim_once('k'::text, null::interval, null::interval)"} {
		_, err := other.Exec(t.Context(), query, pgx.QueryExecModeExec)
		must(t, err)
	}
	check(t, conn, []trial{
		{"lock_tx('k'::text, '0'::interval, false, true)", "false"},
		{"lock_tx('k'::text, '20 ms'::interval, false, true)", "false"},
		{"lock_tx('k'::text, '20 ms'::interval, true, true)", "true"},
		{"claim_once('k'::text, '20 ms'::interval, null::interval) is null", "true"},
	})
	do := func(conn *pgx.Conn, queries ...string) {
		t.Helper()
		for _, query := range queries {
			_, err := conn.Exec(t.Context(), query, pgx.QueryExecModeExec)
			must(t, err)
		}
	}
	asked := "'" + rand.Text() + "'::text, 'f'::text"
	do(conn, "begin")
	check(t, conn, []trial{
		{"(claim_request(" + asked + ", '1 minute'::interval, null::interval)).outcome", "first"},
		{"answer_request(" + asked + ", 'a'::bytea) is null", "false"}, // void is not NULL
		{"(claim_request(" + asked + ", '0'::interval, null::interval)).outcome", "answered"},
	})
	do(conn, "rollback")
	// A snapshot that is older than a commit, of what had begun before it or not.
	for _, begun := range []bool{false, true} {
		do(other, "rollback", "begin")
		if begun {
			do(other, "select pg_current_xact_id()")
			do(conn, "select pg_current_xact_id()") // a later one has ended
		}
		do(conn, "begin isolation level repeatable read", "select 1")
		do(other, "select pg_current_xact_id()", "commit")
		check(t, conn, []trial{{"lock_tx('k'::text, '1 minute'::interval, false, false)", "LK002"}})
		do(conn, "rollback")
	}
}

// callsOfSessions is the same for advisory locks.
func callsOfSessions(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	s := fmt.Sprint(mathrand.Int64())
	batch := func(ops, ids string) string {
		return "pgxlock_advisory_batch('{" + ops + "}'::integer[], '{" + ids + "}'::bigint[], " + s + "::bigint)"
	}
	holder, err := pgx.ConnectConfig(t.Context(), conn.Config())
	must(t, err)
	defer holder.Close(t.Context())
	check(t, holder, []trial{
		{"(" + batch("0,1,4", "1,2,3") + ")[2] > 0::bigint", "true"},
		{"(" + batch("0,1,4,5", "1,2,3,4") + "::text[])[1:3] OPERATOR(pg_catalog.=) '{null,null,null}'::text[]", "true"},
		{batch("8", "1"), pgerrcode.InvalidParameterValue},
	})
	check(t, conn, []trial{
		{"(select assert_advisory_lock_held(1, 2::bigint, l.session, l.token) = l.token from pgxlock_advisory_locks l where l.key_id = 2::bigint and l.session = " + s + "::bigint)", "true"},
		{"assert_advisory_lock_held(1, 1::bigint, " + s + "::bigint, 7::bigint)", "LK001"},
		{"assert_advisory_lock_held(2, 1::bigint, " + s + "::bigint, 7::bigint)", "LK001"},
		{"assert_advisory_lock_held(2, 1::bigint, " + s + "::bigint, null::bigint)", pgerrcode.InvalidParameterValue},
		{batch("0", "1"), pgerrcode.ObjectNotInPrerequisiteState},
		{"pgxlock_reap_advisory(10) >= 0::bigint", "true"},
		{"pgxlock_reap_advisory(0)", pgerrcode.InvalidParameterValue},
	})
	check(t, holder, []trial{{batch("2,3,6,7,2", "1,2,3,4,1") + "::text[] OPERATOR(pg_catalog.=) '{1,1,1,1,null}'::text[]", "true"}})
}

// callsOfWaiters is the same for the queue.
func callsOfWaiters(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	name := rand.Text()
	publish := func(names, tickets, holds string) string {
		return "(select string_agg(concat_ws(':'::text, b.ask, b.deadlock), ','::text) from pgxlock_publish_batch('{0,1}'::integer[], '" + names + "'::text[], '" + tickets +
			"'::bigint[], '{1,1}'::integer[], " + holds + "::text[], null::bigint, 'o'::text, 60000::bigint, 1) b)"
	}
	const none = "'{null,null}'"
	take := func(holder, ticket string) string {
		return "(select concat_ws(':'::text, b.tokens[1] is not null, coalesce(b.ahead[1], false), coalesce(b.held_by[1], CASE WHEN b.tokens[1] is not null THEN '" + holder + "'::text END)) from pgxlock_acquire_batch('{" + name + "}'::text[], '{" + holder +
			"}'::text[], '{60000}'::bigint[], '{null}'::text[], '{" + ticket + "}'::bigint[]) b)"
	}
	takeOne := func(holder string) string {
		return "(select concat_ws(':'::text, b.token is not null, b.held_by) from pgxlock_acquire_one('one " + name + "'::text, '" + holder + "'::text, 60000::bigint, '{}'::text, 0::bigint) b)"
	}
	inTurn := func(holder, ticket string) string {
		return "(select b.acquired from acquire_in_turn('" + name + "'::varchar, '" + holder + "'::varchar, 60, " + ticket + "::bigint) b)"
	}
	wake := func(kind int, name, ticket string) string {
		return fmt.Sprintf("(select count(*) from pgxlock_wake_batch('{%d}'::integer[], '{%s}'::text[], '{%s}'::bigint[]))", kind, name, ticket)
	}
	check(t, conn, []trial{
		{take("h", "0"), "t:f:h"},
		{publish("{"+name+",7}", "{1000002,1000001}", none), "f,t"},
		{publish("{"+name+",7}", "{1000002,1000001}", `array['["h", "advisory:1:1:7"]', null]`), "f:h,t"},
		{take("x", "0"), "f:t:h"},
		{take("x", "1000000"), "f:f:h"},
		{take("x", "null"), "f:f:h"},
		{wake(0, name, "null"), "1"},
		{wake(0, name, "1000002"), "0"},
		{wake(1, "7", "1000001"), "1"}, // not stamped, and free
		{"wake_lock_waiter('" + name + "'::varchar)", "true"},
		{"wake_lock_waiter(null::varchar)", pgerrcode.InvalidParameterValue},
		{inTurn("s", "null"), "false"},
		{inTurn("s", "null"), "false"},
		{inTurn("s", "1000003"), "false"},
		{inTurn("s", "-1"), pgerrcode.InvalidParameterValue},
		{"leave_queue('" + name + "'::varchar, 's'::varchar)", "true"},
		{"leave_queue('" + name + "'::varchar, 's'::varchar)", "false"},
		{"release_lock('" + name + "'::varchar, 'h'::varchar)", "true"},
		{takeOne("y"), "t"},
		{takeOne("x"), "f:y"},
		{"pgxlock_release_one('one " + name + "'::text, 'y'::text, null::bigint)", "r"},
		{take("y", "1000002"), "t:f:y"},
		{"release_lock('" + name + "'::varchar, 'y'::varchar)", "true"},
		{publish("{"+name+",7}", "{null,1000001}", none), "t,t"},
		{"pgxlock_withdraw_batch('{1}'::integer[], '{7}'::text[], '{1000001}'::bigint[])::text is null", "false"},
		{"pgxlock_refused_batch('{1}'::integer[], '{7}'::text[], '{1000001}'::bigint[])::text is null", "false"},
		{"pgxlock_waited_for('{1}'::integer[], '{7}'::text[])::text = '{f}'::text", "true"},
		{"pgxlock_notify_holders('{1,2}'::integer[], '{7,7}'::bigint[])::text = '{0,0}'::text", "true"},
		{"pgxlock_waiter_key(7::bigint) is null", "false"},
		{"pgxlock_reap_waiters(10) >= 0::bigint", "true"},
		{"pgxlock_reap_waiters(0)", pgerrcode.InvalidParameterValue},
	})
}

// callsOfPrimitives calls what is built on locks, as Lockers and programs in SQL do.
func callsOfPrimitives(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	name := rand.Text()
	permit := func(holder, ticket string) string {
		return "(select concat_ws(':'::text, b.acquired, b.permit, b.ahead, b.held_by, b.others) from pgxlock_permit_batch('{" + name + "}'::text[], '{1}'::integer[], '{" + holder +
			"}'::text[], '{60000}'::bigint[], '{null}'::text[], '{" + ticket + "}'::bigint[]) b)"
	}
	inTurn := func(holder string) string {
		return "(select concat_ws(':'::text, b.acquired, b.permits[1]) from acquire_permits_in_turn('" + name + "'::varchar, '" + holder + "'::varchar, 2, 1, 60, null::bigint, '{}'::jsonb) b)"
	}
	asked := func(holder string) string {
		return "(select concat_ws(':'::text, d.n, d.reason) from pgxlock_step_downs('{0}'::integer[], '{" + name + "#1}'::text[], '{" + holder + "}'::text[]) d)"
	}
	check(t, conn, []trial{
		{permit("h", "0"), "t:1:f"},
		{permit("x", "0"), "f:f:h"},
		{permit("x", "5"), "f:f:h"},
		{"acquire_permit('" + name + "'::varchar, 'h'::varchar, 1)::text is null", "true"},
		{"acquire_permit('" + name + "'::varchar, 'h'::varchar, 2)::text", name + "#2"},
		{"acquire_permit('" + name + "'::varchar, 'h'::varchar, 0)", pgerrcode.InvalidParameterValue},
		{inTurn("w"), "f"},
		{inTurn("w"), "f"},
		{"release_lock('" + name + "#1'::varchar, 'h'::varchar)", "true"},
		{inTurn("w"), "t:" + name + "#1"},
		{inTurn("w"), "t:" + name + "#1"},
		{"release_lock('" + name + "#1'::varchar, 'w'::varchar)", "true"},
		{"acquire_permit('" + name + "'::varchar, 'h'::varchar, 2)::text", name + "#1"},
		{"ask_to_step_down('" + name + "#1'::varchar, 'why'::text)", "true"},
		{"ask_to_step_down('" + name + "'::varchar)", "false"},
		{"ask_to_step_down(null::varchar)", pgerrcode.InvalidParameterValue},
		{"pgxlock_ask_to_step_down(1, '7'::text, 'me'::text, ''::text)", "{}"},
		{asked("x") + " is null", "true"},
		{asked("h"), "1:why"},
		{"release_lock('" + name + "#1'::varchar, 'h'::varchar)", "true"},
		{"release_lock('" + name + "#2'::varchar, 'h'::varchar)", "true"},
	})
}

// callsOfEvictions evicts, and asks who was evicted.
func callsOfEvictions(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	name := rand.Text()
	evict := func(name, holder, token, why string) string {
		return "evict_lock('" + name + "'::varchar, '" + holder + "'::varchar, " + token + "::bigint, " + why + "::text)"
	}
	evicted := "(select concat_ws(':'::text, e.n, e.reason, e.ms < 60000::bigint) from pgxlock_evicted('{0}'::integer[], '{" + name + "}'::text[], '{h}'::text[], array[%s]) e)"
	var token string
	tokenOf := func() string {
		must(t, conn.QueryRow(t.Context(), "select (t.fencing_token)::text from public.try_acquire_lock('"+name+"'::varchar, 'h'::varchar, '1 minute'::interval, '{}'::jsonb) t", pgx.QueryExecModeExec).Scan(&token))
		return token
	}
	tokenOf()
	check(t, conn, []trial{
		{evict(name, "x", token, "'why'"), "false"},
		{evict(name, "h", "1", "'why'"), "false"},
		{evict(name, "h", "null", "'why'"), pgerrcode.InvalidParameterValue},
		{evict(name, "h", token, "''"), pgerrcode.InvalidParameterValue},
		{evict(name, "h", token, "'why'"), "true"},
		{evict(name, "h", token, "'why'"), "false"},
		{fmt.Sprintf(evicted, token+"::bigint"), "1:why:t"},
		{"pgxlock_evicted('{0}'::integer[], '{}'::text[], '{}'::text[], '{}'::bigint[]) is null", pgerrcode.InvalidParameterValue},
		{"acquire_shared_lock('" + name + "'::varchar, 'h'::varchar, 60, '{}'::jsonb)", "true"},
	})
	must(t, conn.QueryRow(t.Context(), "select (t.fencing_token)::text from public.try_acquire_shared_lock('"+name+"'::varchar, 'h'::varchar, '1 minute'::interval, '{}'::jsonb) t", pgx.QueryExecModeExec).Scan(&token))
	check(t, conn, []trial{
		{evict(name, "x", token, "'why'"), "false"},
		{evict(name, "h", token, "'why'"), "true"},
		{evict(name, "h", token, "'why'"), "false"},
		{"acquire_lock('" + name + "'::varchar, 'h'::varchar, 60, '{}'::jsonb)", "true"},
		{"release_lock('" + name + "'::varchar, 'h'::varchar)", "true"},
		{"pg_catalog.pg_try_advisory_lock(7::bigint)", "true"},
		{"evict_advisory_lock(pg_catalog.pg_backend_pid(), 7::bigint, 'why'::text, 1, NULL::text)", "true"},
		{"evict_advisory_lock(pg_catalog.pg_backend_pid(), advisory_lock_key('k'::text), 'why'::text, 1, 'k'::text)", "false"},
		{"evict_advisory_lock(pg_catalog.pg_backend_pid(), 7::bigint, 'why'::text, 2, NULL::text)", "false"},
		{"evict_advisory_lock(pg_catalog.pg_backend_pid(), 7::bigint, 'why'::text, 3, NULL::text)", pgerrcode.InvalidParameterValue},
		{"pg_catalog.pg_advisory_unlock(7::bigint)", "true"},
		{"pgxlock_publish_names('{a,b,a}'::text[]) is null", "false"},
		{"pgxlock_publish_names('{\"\"}'::text[])", pgerrcode.InvalidParameterValue},
	})
}

// readsOfViews reads the views of holders and waiters, for which it takes a right of its own.
func readsOfViews(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	name := rand.Text()
	check(t, conn, []trial{
		{"acquire_lock('" + name + "'::varchar, 'h'::varchar, 60, '{}'::jsonb)", "true"},
		{"(select b.ask from pgxlock_publish_batch('{0}'::integer[], '{" + name + "}'::text[], '{1000003}'::bigint[], '{1}'::integer[], '{null}'::text[], null::bigint, 'o'::text, 60000::bigint, 1) b)", "false"},
		{"(select pg_catalog.count(h::text) >= 1::bigint from lock_holders h)", "true"},
		{"(select pg_catalog.count(w::text) >= 1::bigint from lock_waiters w)", "true"},
		{"pgxlock_withdraw_batch('{0}'::integer[], '{" + name + "}'::text[], '{1000003}'::bigint[])::text is null", "false"},
		{"release_lock('" + name + "'::varchar, 'h'::varchar)", "true"},
	})
}

// callsOfLimits is the same for limits.
func callsOfLimits(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	name := rand.Text()
	reserve := func(rate, burst, n, wait string) string {
		return "(select concat_ws(':'::text, b.granted, b.delay > interval '1 minute') from reserve_rate('" + name + "'::varchar, " + rate +
			"::double precision, " + burst + "::integer, " + n + "::integer, " + wait + "::interval) b)"
	}
	batch := func(unused string) string {
		return "(select string_agg(concat_ws(':'::text, b.granted, b.delay > 0::bigint), ','::text) from pgxlock_limit_batch(3600000000000::bigint, 2, '{" + name + "2," + name +
			"1," + name + "2}'::text[], '{2,1,1}'::integer[], '{0,0,0}'::bigint[], " + unused + "::bigint[]) b)"
	}
	check(t, conn, []trial{
		{"allow_rate('" + name + "'::varchar, 0.001::double precision, 2)", "true"},
		{reserve("0.001", "2", "2", "null"), "t:t"},
		{reserve("0.001", "2", "1", "'0'"), "f:t"},
		{reserve("0.001", "2", "3", "null"), pgerrcode.InvalidParameterValue},
		{reserve("0", "2", "1", "null"), pgerrcode.InvalidParameterValue},
		{reserve("1", "0", "1", "null"), pgerrcode.InvalidParameterValue},
		{reserve("1", "1", "1", "'-1 s'"), pgerrcode.InvalidParameterValue},
		{"allow_rate(null::varchar, 1::double precision, 1)", pgerrcode.InvalidParameterValue},
		{batch("'{null,null,null}'"), "t:f,t:f,f:t"},
		{batch("'{0,null}'"), pgerrcode.InvalidParameterValue},
		{batch("array[(select max(b.tat) from pgxlock_limit_batch(3600000000000::bigint, 2, '{" + name + "2}'::text[], '{1}'::integer[], '{0}'::bigint[], '{null}'::bigint[]) b), null, null]"), "t:f,t:f,t:f"},
		{"(select removed >= 0::bigint from pgxlock_reap_limits(0, 10000))", "true"},
		{"(select next_page from pgxlock_reap_limits(-1))", pgerrcode.InvalidParameterValue},
	})
}

// callsOfRuns starts, finishes and forgets runs, and asks what is due.
func callsOfRuns(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	const slot = "'2026-03-29 01:30:00+00'::timestamptz"
	key := "'" + rand.Text() + "'::text" // nobody's yet
	start := "pgxlock_start_run(" + key + ", " + slot + ", null::interval, null::interval, null::text, '99 years'::interval, "
	check(t, conn, []trial{
		{"(select s.attempt is null from " + start + "'h'::text, null::text) s)", "false"},
		{"(select s.attempt is null from " + start + "'h'::text, null::text) s)", "false"},
		{"(select s.attempt is null from " + start + "'other'::text, null::text) s)", "true"},
		{"pgxlock_finish_run(" + key + ", " + slot + ", 'h'::text, 'withdrawn'::text, null::text)", "true"},
		{"(select s.attempt from " + start + "'h'::text, null::text) s)", "1"},
		{"pgxlock_finish_run(" + key + ", " + slot + ", 'h'::text, 'failed'::text, 'why'::text)", "true"},
		{"pgxlock_finish_run(" + key + ", " + slot + ", 'h'::text, 'failed'::text, 'why'::text)", "true"},
		{"acquire_lock('l'::varchar, 'h2'::varchar, 60, '{}'::jsonb)", "true"},
		{"(select s.attempt from " + start + "'h2'::text, 'l'::text) s)", "2"},
		{"(select s.attempt from " + start + "'x'::text, 'l'::text) s)", "LK001"},
		{"pgxlock_finish_run(" + key + ", " + slot + ", 'h'::text, 'succeeded'::text, null::text)", "false"},
		{"pgxlock_finish_run(" + key + ", " + slot + ", 'h2'::text, 'succeeded'::text, null::text)", "true"},
		{"release_lock('l'::varchar, 'h2'::varchar)", "true"},
		{"pgxlock_finish_run(" + key + ", " + slot + ", 'h2'::text, 'done'::text, null::text)", pgerrcode.InvalidParameterValue},
		{"(select count(*) from pgxlock_due_runs(" + key + ", '2 days'::interval, '1 hour'::interval, 'Europe/Berlin'::text, 3, true))", "4"},
		{"(select count(*) from pgxlock_due_runs(" + key + ", '1 hour'::interval, '1 minute'::interval, 'UTC'::text, 3, true) d where d.lasts > 0::bigint)", "1"},
		{"start_run(" + key + ", '36500 days'::interval, '0'::interval, 'UTC'::text) is null", "false"},
		{"start_run(" + key + ", '36500 days'::interval, '0'::interval, 'UTC'::text) is null", "true"},
		{"start_run_at('tick'::text, '2026-11-30 00:00:00+00'::timestamptz - '200 years'::interval)", pgerrcode.InvalidParameterValue},
		{"start_run('k'::text, '1 month'::interval, '0'::interval, 'UTC'::text)", pgerrcode.InvalidParameterValue},
		{"start_run('k'::text, '1 hour'::interval, '1 hour'::interval, 'UTC'::text)", pgerrcode.InvalidParameterValue},
		{"start_run('k'::text, '1 hour'::interval, '0'::interval, 'Europe/Berlin'::text)", pgerrcode.InvalidParameterValue},
		{"start_run(''::text, '1 hour'::interval, '0'::interval, 'UTC'::text)", pgerrcode.InvalidParameterValue},
		{"finish_run(" + key + ", (select d.slot from pgxlock_due_runs(" + key + ", '36500 days'::interval, '0'::interval, 'UTC'::text, 0, false) d), null::text)", "true"},
		{"start_run_at(" + key + ", pg_catalog.now())", "true"},
		{"finish_run('tick'::text, pg_catalog.now(), null::text)", "false"},
		{"(select count(*) from list_runs(" + key + ", 10))", "3"},
		{"(select count(*) > 2::bigint from list_runs(null::text, 100))", "true"},
		{"(select count(*) from list_runs(" + key + ", 0))", pgerrcode.InvalidParameterValue},
		{"start_run(" + key + " || '2'::text, '120 days'::interval, '0'::interval, 'UTC'::text, 'next'::text) is null", "true"},
		{"start_run(" + key + " || '2'::text, '120 days'::interval, '1 hour'::interval, 'UTC'::text, 'next'::text) is null", "true"},
		{"(select d.due from pgxlock_due_runs(" + key + " || '2'::text, '120 days'::interval, '1 hour'::interval, 'UTC'::text, 0, false, 'next'::text) d)", "false"},
		{"start_run(" + key + " || '2'::text, '120 days'::interval, '0'::interval, 'UTC'::text, 'now'::text) is null", "false"},
		{"start_run(" + key + " || '2'::text, '120 days'::interval, '0'::interval, 'UTC'::text, 'later'::text) is null", pgerrcode.InvalidParameterValue},
	})
}

// callsOfShares is the same for shared leases.
func callsOfShares(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	name := rand.Text()
	of := func(holder string) string { return "('" + name + "'::varchar, '" + holder + "'::varchar" }
	batch := func(function, rest string) string {
		return "(select string_agg(concat_ws(':'::text, b), ','::text) from pgxlock_" + function + "_batch('{" + name + "," + name + "}'::text[], '{a,c}'::text[], " + rest + ") b)"
	}
	const nulls, ttls = "'{null,null}'", "'{60000,60000}'::bigint[]"
	shared := "(select string_agg(concat_ws(':'::text, b.acquired, b.ahead, b.held_by), ','::text) from pgxlock_try_in_turn('{" + name + "," + name + "}'::text[], '{a,c}'::text[], " +
		ttls + ", " + nulls + "::text[], '{0,null}'::bigint[], true) b)"
	check(t, conn, []trial{
		{"acquire_shared_lock" + of("a") + ")", "true"},
		{"acquire_shared_lock" + of("b") + ", 60, '{}'::jsonb)", "true"},
		{"(select concat_ws(':'::text, b.acquired, b.held_by) from try_acquire_shared_lock" + of("b") + ", '1 minute'::interval) b)", "t:b"},
		{"acquire_lock" + of("a") + ")", "false"},
		{"extend_shared_lock" + of("a") + ", 60)", "true"},
		{"extend_shared_lock" + of("x") + ")", "false"},
		{"assert_shared_lock_held" + of("a") + ") is null", "false"},
		{"assert_shared_lock_held" + of("x") + ")", "LK001"},
		{"(select count(*) from pgxlock_holders('" + name + "'::text) h where h.shared)", "2"},
		{shared, "t:f:a,t:f:c"},
		{batch("renew_shares", nulls+"::bigint[], "+ttls), "renewed,renewed"},
		{"release_shared_lock" + of("b") + ")", "true"},
		{batch("release_shares", nulls+"::bigint[]"), "left,released"},
		{batch("release_shares", nulls+"::bigint[]"), "gone,gone"},
		{"acquire_shared_lock" + of("d") + ")", "true"},
		{"release_all_locks('d'::varchar)", "1"},
		{"acquire_lock" + of("a") + ")", "true"},
		{"acquire_shared_lock" + of("b") + ")", "false"},
		{"(select b.acquired from acquire_shared_in_turn" + of("b") + ", 60) b)", "false"},
		{"release_lock" + of("a") + ")", "true"},
		{"(select b.acquired from acquire_shared_in_turn" + of("b") + ", 60, null::bigint, '{}'::jsonb) b)", "true"},
		{"release_shared_lock" + of("b") + ")", "true"},
		{"acquire_shared_lock" + of("*") + ")", pgerrcode.InvalidParameterValue},
		{"pgxlock_reap_shares('1 hour'::interval, 10) >= 0::bigint", "true"},
		{"pgxlock_reap_shares('1 hour'::interval, 0)", pgerrcode.InvalidParameterValue},
	})
}

// ours is all the text that runs in a migrator's session or in our functions.
func ours(t *testing.T) string {
	t.Helper()
	var text strings.Builder
	for _, dir := range []string{".", "sql"} {
		files, err := fs.Glob(os.DirFS(dir), "*.sql")
		must(t, err)
		for _, file := range files {
			content, err := os.ReadFile(dir + "/" + file)
			must(t, err)
			text.Write(content)
		}
	}
	return text.String()
}

// hijackSQL makes, in the schema that comes first, what would be run instead of
// pg_catalog's own by every session that calls one of pg_catalog's functions or operators
// with types that only a cast makes fit, and types and tables called as those of
// pg_catalog. All of it raises HJ000. pg_temp.ours holds the text to attack.
const hijackSQL = `
DO $do$
DECLARE
  v_types text[] := '{text,varchar,bpchar,name,"\"char\"",smallint,integer,bigint,numeric,"double precision",oid,regclass,regnamespace,interval,timestamptz,timestamp,boolean,jsonb,bytea,bit,varbit,xid8,tid,text[],varchar[],name[],integer[],bigint[],oid[],boolean[],xid,int2vector,oidvector,inet,regproc,regprocedure,record}';
  -- from, to: what a cast would bridge
  v_swaps text[] := '{{text,varchar},{text,name},{text,bpchar},{name,text},{name,varchar},{bigint,integer},{bigint,smallint},{integer,bigint},{integer,smallint},
    {"double precision",integer},{"double precision",bigint},{"double precision",numeric},{oid,regclass},{oid,regproc},{oid,bigint},{regclass,oid},{regclass,text},{regclass,varchar},
    {numeric,integer},{bit,bigint},{"\"any\"",text},{"\"any\"",varchar},{"\"any\"",bigint},{"\"any\"",name},{anyelement,text},{anynonarray,text},{anyarray,text[]},
    {"timestamp with time zone",timestamp},{interval,text},{interval,integer},{boolean,text},{boolean,integer},{xid8,bigint},{xid8,text},{pg_snapshot,text},{tid,text}}';
  f record; v_l text; v_r text; v_op text; i integer; j integer; v_args text[]; v_out text;
BEGIN
  FOR f IN
    SELECT p.proname, p.proargnames, p.pronargdefaults, p.provariadic,
           (SELECT pg_catalog.array_agg(pg_catalog.format_type(a, NULL) ORDER BY n) FROM pg_catalog.unnest(p.proargtypes) WITH ORDINALITY x (a, n)) AS args,
           CASE WHEN t.typtype = 'p' THEN 'text' ELSE pg_catalog.format_type(p.prorettype, NULL) END AS result
      FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_type t ON t.oid = p.prorettype
     WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.pronargs > 0
       AND (SELECT o.words FROM pg_temp.ours o) @> ARRAY[p.proname::text]
  LOOP
    FOR i IN 1..array_length(v_swaps, 1) LOOP
      FOR j IN 0..CASE WHEN f.provariadic <> 0 THEN 3 ELSE 0 END LOOP
        v_args := pg_catalog.array_replace(f.args, v_swaps[i][1], v_swaps[i][2]);
        CONTINUE WHEN v_args OPERATOR(pg_catalog.=) f.args AND j = 0;
        v_args := v_args || pg_catalog.array_fill(v_swaps[i][2], ARRAY[j]);
        SELECT pg_catalog.string_agg(pg_catalog.concat_ws(' ', pg_catalog.quote_ident(nullif(f.proargnames[n], '')), a, CASE WHEN f.pronargdefaults > 0 THEN 'DEFAULT NULL' END), ', ' ORDER BY n)
          INTO v_out FROM pg_catalog.unnest(v_args) WITH ORDINALITY x (a, n);
        BEGIN
          EXECUTE pg_catalog.format($$CREATE FUNCTION %I(%s) RETURNS %s LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''hijacked: %s'' USING ERRCODE = ''HJ000''; END'$$,
                         f.proname, v_out, f.result, f.proname || ' ' || pg_catalog.replace(v_args::text, '"', ''));
        EXCEPTION WHEN OTHERS THEN NULL;     -- there already, or no such function can be
        END;
      END LOOP;
    END LOOP;
  END LOOP;
  FOREACH v_l IN ARRAY v_types LOOP
    FOREACH v_r IN ARRAY v_types LOOP
      FOREACH v_out IN ARRAY ARRAY['boolean', v_l] LOOP
        EXECUTE pg_catalog.format($$CREATE FUNCTION hijack_%s(%s, %s) RETURNS %s LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''hijacked: operator on %s and %s'' USING ERRCODE = ''HJ000''; END'$$,
                       CASE v_out WHEN 'boolean' THEN 'comparison' ELSE 'sum' END, v_l, v_r, v_out, v_l, v_r);
        EXIT WHEN v_l = 'boolean';
      END LOOP;
      FOREACH v_op IN ARRAY '{=,<>,<,<=,>,>=,~~}'::text[] LOOP
        EXECUTE pg_catalog.format('CREATE OPERATOR %s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = hijack_comparison)', v_op, v_l, v_r);
      END LOOP;
      CONTINUE WHEN v_l = 'boolean';
      FOREACH v_op IN ARRAY '{+,-,*,||,<<,>>,|,&}'::text[] LOOP
        EXECUTE pg_catalog.format('CREATE OPERATOR %s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = hijack_sum)', v_op, v_l, v_r);
      END LOOP;
    END LOOP;
  END LOOP;
  CREATE FUNCTION hijack() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''hijacked: a type'' USING ERRCODE = ''HJ000''; END';
  FOREACH v_op IN ARRAY '{text,timestamptz,jsonb,regclass,oid,bytea,name,int8,int4,bool,varchar,interval,xid8,pg_snapshot,record}'::text[] LOOP
    EXECUTE pg_catalog.format('CREATE DOMAIN %I AS pg_catalog.text CHECK (hijack())', v_op);
  END LOOP;
  CREATE COLLATION "C" FROM pg_catalog."POSIX";
  CREATE TABLE pg_locks (); CREATE TABLE pg_database (); CREATE TABLE pg_roles ();
  CREATE TABLE pg_proc (); CREATE TABLE pg_class (); CREATE TABLE pg_namespace (); CREATE TABLE pg_attribute (); CREATE TABLE pg_index ();
END $do$`

// overloadSQL makes what would be run instead of each of our own functions if
// one of ours called another with types that only a cast makes fit. (One more
// argument with a default makes every call an error, which nobody can prevent.)
const overloadSQL = `
DO $do$
DECLARE
  v_swaps text[] := '{{text,varchar},{character varying,text},{bigint,integer},{integer,bigint},{interval,text}}';
  f record; i integer; v_args text[];
BEGIN
  FOR f IN
    SELECT p.proname, (SELECT coalesce(pg_catalog.array_agg(pg_catalog.format_type(a, NULL) ORDER BY n), '{}') FROM pg_catalog.unnest(p.proargtypes) WITH ORDINALITY x (a, n)) AS args
      FROM pg_catalog.pg_proc p
     WHERE p.pronamespace = 'public'::regnamespace::oid AND p.proowner <> current_user::regrole::oid
  LOOP
    FOR i IN 1..array_length(v_swaps, 1) LOOP
      v_args := pg_catalog.array_replace(f.args, v_swaps[i][1], v_swaps[i][2]);
      CONTINUE WHEN v_args OPERATOR(pg_catalog.=) f.args;
      BEGIN
        EXECUTE pg_catalog.format($$CREATE FUNCTION %I(%s) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''hijacked: %s'' USING ERRCODE = ''HJ000''; END'$$,
                       f.proname, pg_catalog.array_to_string(v_args, ', '), f.proname);
      EXCEPTION WHEN duplicate_function THEN NULL;
      END;
    END LOOP;
  END LOOP;
END $do$`

func TestSoakObjectsOfARoleThatMayCreateInTheSchemaDoNotRun(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newSeed(t)
	hijacker, victim := newRole(t, db), newRole(t, db)
	db.Exec(t, "grant create on schema public to "+hijacker+"; grant select, insert, update, delete on distributed_locks to "+victim)
	h := pgtest.Connect(t, as(t, db, "role", hijacker))
	text := ours(t)
	_, err := h.Exec(t.Context(), "create temp table ours as select array(select distinct m[1] from regexp_matches(lower($1::text), '([a-z_0-9]+)\\(', 'g') m) as words",
		pgx.QueryExecModeExec, text)
	must(t, err)
	_, err = h.Exec(t.Context(), hijackSQL)
	must(t, err)
	expect(t, db.Pool, true, "select count(*) > 300 from pg_catalog.pg_proc where pronamespace = 'public'::regnamespace::oid")

	// It does run for a caller that is not careful.
	_, err = db.Pool.Exec(t.Context(), "select 'a'::varchar = 'b'::varchar")
	refuse(t, err, "HJ000")
	_, err = db.Pool.Exec(t.Context(), "select make_interval(secs => 1)")
	refuse(t, err, "HJ000")

	hostile := pgtest.Connect(t, as(t, db, "role", victim, "search_path", "pg_temp,public,pg_catalog"))
	_, err = hostile.Exec(t.Context(), `
		create temp table distributed_locks (lock_name varchar, holder_id varchar, acquired_at timestamptz, expires_at timestamptz, metadata jsonb, fencing_token bigint);
		create temp table pgxlock_epoch (system_identifier bigint, epoch_base bigint, timeline bigint, undo text[]);
		create temp table pg_class (); create temp table pg_proc (); create temp sequence pgxlock_tokens;
		create temp view lock_leases as select 1 as state; create temp table pg_locks (); create temp table pg_database ();
		create temp table pgxlock_advisory_locks (key_space integer, key_id bigint, session bigint, shared boolean, token bigint);
		create temp table distributed_lock_shares (lock_name varchar, holder_id varchar, fencing_token bigint, acquired_at timestamptz, expires_at timestamptz, metadata jsonb);
		create temp table pgxlock_waiters (kind integer, name text, ticket bigint); create temp sequence pgxlock_tickets;
		create temp table pgxlock_step_down (kind integer, name text, holder text); create temp table pgxlock_semaphores (name text, permits integer);
		create temp table pgxlock_limits (limit_key text, tat bigint); create temp table pgxlock_names (key_id bigint, name text, held_at timestamptz);
		create temp table pgxlock_evictions (kind integer, name text, holder text, token bigint, evicted_at timestamptz, evicted_by text, reason text, key_name text);
		create temp table pgxlock_runs (run_key varchar, slot timestamptz, state text, holder text, lease text, keep_until timestamptz);
		create temp table pgxlock_claims (claim_key varchar, claimed_at timestamptz, expires_at timestamptz, claimed_by xid8)`)
	must(t, err)
	// Names of tables and types are the victim's own affair; what it calls is not.
	var sessions []string
	for _, path := range []string{"pg_catalog, public", "pg_catalog, pg_temp, public"} {
		sessions = append(sessions, as(t, db, "role", victim, "search_path", path), as(t, db, "search_path", path))
	}
	calls := func() {
		t.Helper()
		if !ask[bool](t, db.Pool, "select public.pgxlock_hardened()") {
			db.Exec(t, "grant select, insert, update, delete on pgxlock_claims, pgxlock_advisory_locks, pgxlock_waiters, pgxlock_step_down, pgxlock_semaphores, pgxlock_limits, pgxlock_runs, pgxlock_evictions, pgxlock_names, distributed_lock_shares to "+victim+"; grant usage on sequence pgxlock_tickets to "+victim+"; grant select on lock_holders, lock_waiters to "+victim)
		}
		db.Exec(t, "select setval('public.pgxlock_tickets', 2000000)") // the numbers that callsOfWaiters gives
		for _, url := range sessions {
			conn := pgtest.Connect(t, url)
			goodAndBadCalls(t, conn)
			callsInTransactions(t, conn)
			callsOfSessions(t, conn)
			callsOfWaiters(t, conn)
			readsOfViews(t, conn)
			callsOfPrimitives(t, conn)
			callsOfLimits(t, conn)
			callsOfEvictions(t, conn)
			callsOfRuns(t, conn)
			callsOfShares(t, conn)
		}
		sessions = sessions[:pgtest.Soak(t, 1, len(sessions))] // for all but the first situation
		const acquire = "select public.acquire_lock('temp'::pg_catalog.varchar, $1::pg_catalog.varchar, 60, '{}'::pg_catalog.jsonb)"
		expect(t, hostile, true, acquire, pgx.QueryExecModeExec, "a")
		expect(t, hostile, false, acquire, pgx.QueryExecModeExec, "b")
		expect(t, hostile, 0, "select pg_catalog.count(*) from distributed_locks", pgx.QueryExecModeExec)
		expect(t, hostile, true, "select public.release_lock('temp'::pg_catalog.varchar, 'a'::pg_catalog.varchar)", pgx.QueryExecModeExec)

		const claim = "select public.claim_once('temp'::pg_catalog.text, '1 minute'::pg_catalog.interval, null::pg_catalog.interval)"
		expect(t, hostile, true, claim, pgx.QueryExecModeExec)
		expect(t, hostile, false, claim, pgx.QueryExecModeExec)
		expect(t, hostile, 0, "select pg_catalog.count(*) from pgxlock_claims", pgx.QueryExecModeExec)
		expect(t, hostile, 1, "select public.purge_claims('0'::pg_catalog.interval, 10)", pgx.QueryExecModeExec)
		expect(t, hostile, true, "select public.lock_tx('temp'::pg_catalog.text, '1 minute'::pg_catalog.interval, false, true)", pgx.QueryExecModeExec)
	}
	superuser := as(t, db, "search_path", "public")
	must(t, up(t, superuser)) // adopts
	calls()
	_, err = h.Exec(t.Context(), overloadSQL)
	must(t, err)
	calls()
	for _, way := range ways {
		if strings.HasPrefix(way.name, "golang-migrate") {
			continue // its own statements can be hijacked
		}
		way.again(t, superuser)
	}
	must(t, psql(t, as(t, db, "search_path", "public, pg_catalog"), "-f", upFiles[newest-1]))
	must(t, migrations.Repair(t.Context(), pgtest.Pool(t, superuser), nil))
	version(t, pgtest.Pool(t, superuser), newest)
	calls()
	db.Exec(t, "update pgxlock_epoch set system_identifier = 7::bigint")
	must(t, up(t, superuser)) // repairs
	calls()
	must(t, psqlFiles("down")(t, as(t, db, "search_path", "public, pg_catalog", "pgxlock.force", "on")))
	must(t, up(t, as(t, db, "search_path", "public, pg_catalog")))
	calls()

	// Hardened, what ran would run as the owner. It is refused while others may create, or have
	// made operators and overloads; those that a superuser has are no others', and call nothing either.
	_, err = db.Pool.Exec(t.Context(), "select public.harden_locks()")
	refuse(t, err, pgerrcode.ObjectNotInPrerequisiteState)
	db.Exec(t, "revoke create on schema public from "+hijacker)
	_, err = db.Pool.Exec(t.Context(), "select public.harden_locks()")
	refuse(t, err, pgerrcode.ObjectNotInPrerequisiteState)
	db.Exec(t, "reassign owned by "+hijacker+" to current_user")
	for range 2 {
		db.Exec(t, "select public.harden_locks(), public.grant_locks('"+victim+"'::text, 'application'::text), public.grant_locks('"+victim+"'::text, 'administration'::text)")
		calls()
		db.Exec(t, "select public.soften_locks(), public.revoke_locks('"+victim+"'::text), public.grant_locks('"+victim+"'::text, 'application'::text), public.grant_locks('"+victim+"'::text, 'administration'::text)")
		calls()
	}
	db.Exec(t, "select public.harden_locks()")
	refuse(t, down(t, superuser), pgerrcode.ObjectInUse)
	must(t, migrations.Down(t.Context(), pgtest.Pool(t, superuser), &migrations.Config{Force: true}))
}

func TestNamesOfAnyCollationAreArguments(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, newest)
	conn := db.Connect(t)
	types := []string{`varchar collate "C"`, `varchar collate "POSIX"`, `text`}
	if ask[bool](t, conn, "select exists (select from pg_collation where collprovider = 'i')") {
		_, err := conn.Exec(t.Context(), `create collation anycase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)`)
		must(t, err)
		types = append(types, `varchar collate "und-x-icu"`, `varchar collate anycase`)
	} else {
		t.Log("this server has no ICU")
	}
	for _, typ := range types {
		_, err := conn.Exec(t.Context(), "drop table if exists jobs; create table jobs (name "+typ+", me "+typ+"); insert into jobs values ('Job', 'Me'), ('job', 'me')")
		must(t, err)
		for _, c := range []struct{ query, want string }{
			{"string_agg(acquire_lock(name, me)::text, ' ')", "true true"}, // two locks: a name is its bytes
			{"string_agg(acquire_lock(name, 'x' || me)::text, ' ')", "false false"},
			{"string_agg((try_acquire_lock(name, me, '1 minute')).acquired::text, ' ')", "true true"},
			{"string_agg(extend_lock(name, me)::text, ' ')", "true true"},
			{"string_agg(extend_lock(name, upper(me))::text, ' ')", "false false"},
			{"string_agg((renew_lock(name, me, (select l.fencing_token from distributed_locks l where l.lock_name = name::text collate \"C\")) is not null)::text, ' ')", "true true"},
			{"string_agg((assert_lock_held(name, me) > 0)::text, ' ')", "true true"},
			{"string_agg(release_lock(name, upper(me))::text, ' ')", "false false"},
			{"string_agg(release_lock_fenced(name, me, 1)::text, ' ')", "false false"},
			{"string_agg((advisory_lock_key(name) = advisory_lock_key(name::text collate \"C\"))::text, ' ')", "true true"},
			{"count(distinct advisory_lock_key(name))::text", "2"},
			{"string_agg(release_all_locks(me)::text, ' ')", "1 1"},
			{"string_agg(lock_tx(name, '1 minute', false, true)::text, ' ')", "true true"},
			{"string_agg(claim_once(name)::text, ' ')", "true true"},
			{"string_agg(claim_once(name, '1 minute')::text, ' ')", "false false"},
			{"(purge_claims('0') = 2)::text || ' ' || max(lower(me))", "true me"},
			{"string_agg(release_lock(name, me)::text, ' ')", "false false"},
		} {
			expect(t, conn, c.want, "select "+c.query+" from jobs", pgx.QueryExecModeExec)
		}
	}
}
