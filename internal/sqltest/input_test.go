package sqltest_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

const (
	tooLong = "repeat('x', 256)"
	blanks  = "repeat('x', 255) || '  '" // the column alone would cut them off in silence
	tooBig  = "to_jsonb(repeat('x', 65536))"
)

func TestBadInputIsRefusedByName(t *testing.T) {
	t.Parallel()
	d := install(t)
	refused := func(argument, call string, args ...any) {
		t.Helper()
		call = fmt.Sprintf(call, args...)
		_, err := d.query(call)
		var pgErr *pgconn.PgError
		switch {
		case !errors.As(err, &pgErr) || pgErr.Code != "22023":
			t.Errorf("%s: got %v, want SQLSTATE 22023", call, err)
		case !strings.Contains(pgErr.Message, argument):
			t.Errorf("%s: the message does not name %s: %s", call, argument, pgErr.Message)
		}
	}
	for _, lock := range []string{"NULL", "''", tooLong, blanks} {
		for _, call := range []string{
			"acquire_lock(%s, 'A')", "(try_acquire_lock(%s, 'A')).acquired", "renew_lock(%s, 'A', 1)", "extend_lock(%s, 'A')",
			"release_lock(%s, 'A')", "release_lock_fenced(%s, 'A', 1)", "assert_lock_held(%s, 'A')",
		} {
			refused("p_lock_name", call, lock)
		}
	}
	for _, holder := range []string{"NULL", "''", tooLong, blanks, "'*shared'"} {
		for _, call := range []string{
			"acquire_lock('k', %s)", "(try_acquire_lock('k', %s)).acquired", "renew_lock('k', %s, 1)", "extend_lock('k', %s)",
			"release_lock('k', %s)", "release_lock_fenced('k', %s, 1)", "release_all_locks(%s)", "assert_lock_held('k', %s)",
		} {
			refused("p_holder_id", call, holder)
		}
	}
	for _, seconds := range []string{"0", "-1", "-2147483648", "NULL"} {
		refused("ttl", "acquire_lock('k', 'A', %s)", seconds)
		refused("ttl", "extend_lock('k', 'A', %s)", seconds)
	}
	for _, ttl := range []string{"interval '0'", "interval '-1 s'", "interval '1 month -31 days'", "interval '101 years'", "NULL"} {
		refused("ttl", "(try_acquire_lock('k', 'A', %s)).acquired", ttl)
		refused("ttl", "renew_lock('k', 'A', 1, %s)", ttl)
	}
	refused("p_metadata", "acquire_lock('k', 'A', 30, %s)", tooBig)
	refused("p_metadata", "(try_acquire_lock('k', 'A', '30 s', %s)).acquired", tooBig)
	refused("p_fencing_token", "renew_lock('k', 'A', NULL)")
	refused("p_fencing_token", "release_lock_fenced('k', 'A', NULL)")
	for _, name := range []string{"NULL", "''", tooLong, blanks} {
		for argument, calls := range map[string][]string{
			"p_name": {"lock_tx(%s)", "lock_tx(%s, '1 s')", "lock_tx(%s, '0')", "lock_tx(%s, p_shared => true)"},
			"p_key": {
				"claim_once(%s)", "claim_once(%s, '1 s')", "claim_once(%s, '0')", "claim_once(%s, NULL, '1 s')",
				"(claim_request(%s, 'f')).outcome", "answer_request(%s, 'f', '') is null",
			},
			"p_fingerprint": {"(claim_request('k', %s)).outcome", "(claim_request('k', %s, '0')).outcome", "answer_request('k', %s, '') is null"},
		} {
			for _, call := range calls {
				refused(argument, call, name)
			}
		}
	}
	for _, call := range []string{"lock_tx('k', p_shared => NULL)", "lock_tx('k', '0', p_shared => NULL)"} {
		refused("p_shared", call)
	}
	for _, call := range []string{"lock_tx('k', p_allow_stale_snapshot => NULL)", "lock_tx('k', '0', true, NULL)"} {
		refused("p_allow_stale_snapshot", call)
	}
	for _, retention := range []string{"interval '0'", "'-1 s'", "'1 month -31 days'", "'101 years'", "'178000000 years'"} {
		refused("p_retention", "claim_once('k', NULL, %s)", retention)
		refused("p_retention", "claim_once('k', '1 s', %s)", retention)
		refused("p_retention", "(claim_request('k', 'f', '0', %s)).outcome", retention)
	}
	for _, age := range []string{"NULL", "'-1 s'"} {
		refused("p_age", "purge_claims(%s)", age)
	}
	for _, limit := range []string{"NULL", "0", "-1"} {
		refused("p_limit", "purge_claims('1 h', %s)", limit)
	}
	for _, grace := range []string{"NULL", "'-1 s'"} {
		refused("p_grace", "reap_expired_locks(%s)", grace)
	}
	for _, limit := range []string{"NULL", "0", "-1"} {
		refused("p_limit", "reap_expired_locks('1 h', %s)", limit)
	}
	d.want("select count(*) from distributed_locks", "0")
	d.want("select count(*) from pgxlock_claims", "0")
}

func TestLargestInputIsStoredWhole(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	lock, holder := "repeat('é', 255)", "repeat('ü', 254) || ' '"
	d.want(fmt.Sprintf("acquire_lock(%s, %s, 2147483647, to_jsonb(repeat('x', 65534)))", lock, holder), "true")
	d.want(fmt.Sprintf("select lock_name = %s and holder_id = %s and expires_at > now() + interval '68 years' from distributed_locks", lock, holder), "true")
	d.want(fmt.Sprintf("assert_lock_held(%s, %s) > 0", lock, holder), "true")
	d.want(fmt.Sprintf("release_lock(%s, %s)", lock, holder), "true")
	for _, widest := range []string{lock, "repeat(chr(128512), 255)"} { // four bytes each
		d.want(fmt.Sprintf("claim_once(%s)", widest), "true")
		d.want(fmt.Sprintf("claim_once(%s)", widest), "false")
		d.want(fmt.Sprintf("lock_tx(%s, '1 s')", widest), "true")
		d.want(fmt.Sprintf("exists (select from pgxlock_claims where claim_key = %s)", widest), "true")
	}
}

func TestNamesDifferByTheirBytes(t *testing.T) {
	t.Parallel()
	d := install(t)
	holder := d.begin(readCommitted)
	for _, lock := range []string{"k", "K", "k ", " k", "ｋ", "é", "e\u0301", "a%", "a_", `a\`, "a'"} {
		d.want(fmt.Sprintf("acquire_lock(%s, 'A')", quote(lock)), "true")
		d.want(fmt.Sprintf("release_lock(%s, 'a')", quote(lock)), "false")
		d.want(fmt.Sprintf("claim_once(%s)", quote(lock)), "true")
		holder.want(fmt.Sprintf("lock_tx(%s, '0')", quote(lock)), "true")
	}
	d.want("select count(*) from distributed_locks", "11")
	d.want("select count(*) from pgxlock_claims", "11")
	holder.want("select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()", "11")
}

// Callers pass columns of their own, with collations of their own: two that
// PostgreSQL cannot reconcile, and one for which A equals a.
func TestCallersCollationsDoNotMatter(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do(`create collation no_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
		create table jobs (lock text collate "und-x-icu", holder varchar(64) collate "C", folded text collate no_case);
		insert into jobs values ('k', 'A', 'a')`)
	const args = "lock, holder"
	for call, want := range map[string]string{
		"acquire_lock(" + args + ")":                       "true",
		"(try_acquire_lock(" + args + ")).acquired":        "true",
		"extend_lock(" + args + ")":                        "true",
		"assert_lock_held(" + args + ") > 0":               "true",
		"renew_lock(" + args + ", 1) is null":              "true",
		"release_lock_fenced(" + args + ", 1)":             "false",
		"release_all_locks(folded)":                        "0",
		"acquire_lock(lock, folded)":                       "false",
		"assert_lock_held(lock, folded)":                   "LK001",
		"acquire_lock('K' collate no_case, holder)":        "true", // another lock
		"advisory_lock_key(lock) = advisory_lock_key('k')": "true",
		"lock_tx(lock)":                                    "true",
		"lock_tx(lock, '1 s', true)":                       "true",
		"claim_once(lock)":                                 "false",
		"claim_once(lock, '1 s')":                          "false",
		"claim_once(lock, '1 s', '1 day')":                 "false",
		"claim_once(upper(lock))":                          "true", // another key
		"claim_once('K' collate no_case)":                  "true",
		"claim_once(folded || lock, '1 s')":                "true",
		"(claim_request(lock, folded)).outcome":            "other",
	} {
		d.do("delete from distributed_locks; select acquire_lock('k', 'A'); delete from pgxlock_claims; select claim_once('k')")
		d.want("select "+call+" from jobs", want)
	}
}

func TestMetadataBelongsToTheAcquisition(t *testing.T) {
	t.Parallel()
	d := install(t)
	for _, step := range []struct{ call, want string }{
		{`acquire_lock('k', 'A', 30, '{"v": 1}')`, `{"v": 1}`},
		{`acquire_lock('k', 'A')`, `{"v": 1}`}, // left out in a renewal: kept
		{`acquire_lock('k', 'A', 30, NULL)`, `{"v": 1}`},
		{`extend_lock('k', 'A')`, `{"v": 1}`},
		{`acquire_lock('k', 'A', 30, '{"v": 2}')`, `{"v": 2}`},
		{`acquire_lock('k', 'A', 30, '"pod-7"')`, `"pod-7"`},
	} {
		d.want(step.call, "true")
		d.want("select metadata from distributed_locks", step.want)
	}
	d.want(`acquire_lock('k', 'B', 30, '{"thief": true}')`, "false")
	d.want("select metadata from distributed_locks", `"pod-7"`)
	d.expire("k")
	d.want("acquire_lock('k', 'B')", "true")
	d.want("select metadata from distributed_locks", "{}")
	d.expire("k")
	d.want(`acquire_lock('k', 'C', 30, '{"v": 3}')`, "true")
	d.want("select metadata from distributed_locks", `{"v": 3}`)
}

// The clock of a transaction stands still at its begin. A lease that is taken,
// renewed or judged late in a long one goes by the time that it is then.
func TestLongTransactionGoesByTheTimeOfEachCall(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("select acquire_lock('mine', 'A'), acquire_lock('expiring', 'X')")
		s := d.connect()
		s.begin(level)
		s.do("select pg_sleep_until(now() + interval '0.2 s')")
		full := func(what, call string) {
			t.Helper()
			before := s.get("clock_timestamp()")
			s.do("select " + call)
			s.want("select expires_at >= "+quote(before)+"::timestamptz + interval '30 s' from distributed_locks where lock_name = "+quote(what), "true")
		}
		full("new", "acquire_lock('new', 'A')")
		s.want("select acquired_at > now() from distributed_locks where lock_name = 'new'", "true")
		full("mine", "acquire_lock('mine', 'A')")
		full("mine", "extend_lock('mine', 'A')")
		full("mine", "renew_lock('mine', 'A', (select fencing_token from distributed_locks where lock_name = 'mine'))")
		s.commit()

		// It expires after the transaction began, and before it looks.
		d.do("update distributed_locks set expires_at = clock_timestamp() + interval '50 ms' where lock_name = 'expiring'")
		s.begin(level)
		s.do("select pg_sleep_until((select expires_at from distributed_locks where lock_name = 'expiring'))")
		s.want("assert_lock_held('expiring', 'X')", map[bool]string{true: "LK001", false: "LK002"}[level == readCommitted])
		s.rollback()
		d.do("update distributed_locks set expires_at = clock_timestamp() + interval '50 ms' where lock_name = 'expiring'")
		s.begin(level)
		s.do("select pg_sleep_until((select expires_at from distributed_locks where lock_name = 'expiring'))")
		s.want("extend_lock('expiring', 'X')", "false")
		full("expiring", "acquire_lock('expiring', 'A')")
	})
}
