package sqltest_test

import (
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// The functions mean the table beside them, whatever the caller's search_path
// is, and even if it is the schema of the role that installed them: "$user" is
// another schema for another role.
func TestFunctionsMeanTheTableBesideThem(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	d := open(t, db.URL)
	installer := d.get("current_user")
	d.do(`create schema "` + installer + `"`)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	d.want(`to_regclass('"`+installer+`".distributed_locks') is null`, "false")
	other := d.role()
	d.do(`grant usage on schema "` + installer + `" to ` + other + `;
		grant select, insert, update, delete on "` + installer + `".distributed_locks, "` + installer + `".pgxlock_claims to ` + other + `;
		grant select on "` + installer + `".lock_leases to ` + other + `;
		create schema ` + other + ` authorization ` + other)

	d.do("select acquire_lock('k', 'A'), claim_once('k')")
	s := d.connect()
	s.do("set role " + other + "; create table distributed_locks (like \"" + installer + "\".distributed_locks including all)")
	for _, path := range []string{`"$user", "` + installer + `"`, `pg_temp, "` + installer + `"`, `"` + installer + `", pg_catalog`} {
		s.do("set search_path = " + path)
		s.do("create temporary table if not exists distributed_locks (n int)")
		s.do("create temporary table if not exists pgxlock_claims (n int)")
		s.want("acquire_lock('k', 'B')", "false")
		s.want("assert_lock_held('k', 'A') > 0", "true")
		s.want("claim_once('k')", "false")
		s.want("claim_once('k', '1 s')", "false")
		s.want("lock_tx('k', '1 s')", "true")
	}
	s.do("set search_path = ''")
	s.want(`"`+installer+`".acquire_lock('k', 'B')`, "false")
	s.want(`"`+installer+`".acquire_lock('l', 'B')`, "true") // draws a token without a right to the sequence
	s.want(`"`+installer+`".release_lock('l', 'B')`, "true")
}

// With array_nulls = off, which a role or a database may be set to for the sake of old programs, the text {NULL} is no array with a NULL.
func TestFunctionsNeedNoNullInTheTextOfAnArray(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	s := install(t).connect()
	s.do("set array_nulls = off")
	s.want("allow_rate('limit', 1, 1)", "true")
	s.want("acquire_permit('jobs', 'A', 1)", "jobs#1")
	s.want("wake_lock_waiter('jobs')", "false")
	s.want("evict_lock('jobs#1', 'A', (select fencing_token from lock_leases), 'why')", "true")
}

// A database's own collation may change with a library of the system: then an
// index by it is out of order, and lets one name in twice.
func TestNamesAreIndexedByTheirBytes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	adopted := installSeed(t)
	if err := migrations.Up(t.Context(), pgtest.Pool(t, adopted.url), nil); err != nil {
		t.Fatal(err)
	}
	for name, d := range map[string]*database{"new": install(t), "adopted": adopted} {
		for what, catalog := range map[string]string{
			"column":           "select attcollation::regcollation from pg_attribute where attrelid = 'distributed_locks'::regclass and attname = 'lock_name'",
			"index":            "select indcollation[0]::oid::regcollation from pg_index where indrelid = 'distributed_locks'::regclass and indisunique",
			"column of claims": "select attcollation::regcollation from pg_attribute where attrelid = 'pgxlock_claims'::regclass and attname = 'claim_key'",
			"index of claims":  "select indcollation[0]::oid::regcollation from pg_index where indrelid = 'pgxlock_claims'::regclass and indisunique",
			"index of limits":  "select indcollation[0]::oid::regcollation from pg_index where indrelid = 'pgxlock_limits'::regclass and indisunique",
			"index of runs":    "select indcollation[0]::oid::regcollation from pg_index where indrelid = 'pgxlock_runs'::regclass and indisunique",
			"index of tickets": "select indcollation[1]::oid::regcollation from pg_index where indrelid = 'pgxlock_waiters'::regclass and indisunique",
		} {
			if got := d.get(catalog); got != `"C"` {
				t.Errorf("%s database: the %s has collation %s", name, what, got)
			}
		}
	}
}
