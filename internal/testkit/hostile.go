package testkit

import (
	"maps"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// Backends returns the pids of the connections of the Locker with that owner.
func Backends(t *testing.T, db *pgtest.DB, owner string) []int32 {
	t.Helper()
	return Query[[]int32](t, db, `select coalesce(array_agg(pid order by pid), '{}') from pg_stat_activity
		where datname = current_database() and application_name = 'pgxlock ' || $1`, owner)
}

// Controlled returns the same database through a connection that is there
// already, so that what a role is set to later does not concern it.
func Controlled(t *testing.T, db *pgtest.DB) *pgtest.DB {
	t.Helper()
	pool := db.NewPool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	if err := pool.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	return &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}
}

// Set makes the settings those that the role begins with in this database, and
// no others.
func Set(t *testing.T, db *pgtest.DB, settings map[string]string) {
	t.Helper()
	role := "alter role current_user in database " + pgx.Identifier{db.Name}.Sanitize()
	db.Exec(t, role+" reset all")
	for name, value := range settings {
		db.Exec(t, role+" set "+name+" = "+value)
	}
}

// Hostile is what roles are set to for the sake of their other programs.
var Hostile = map[string]string{
	"statement_timeout":                   "'500ms'",
	"lock_timeout":                        "'50ms'",
	"idle_session_timeout":                "'3s'", // between its first statements a busy machine may take long
	"idle_in_transaction_session_timeout": "'100ms'",
	"default_transaction_isolation":       "serializable",
	"default_transaction_read_only":       "on",
	"default_transaction_deferrable":      "on",
	"synchronous_commit":                  "off",
	"search_path":                         "''",
	"row_security":                        "off",
	"standard_conforming_strings":         "off",
	"escape_string_warning":               "on",
	"DateStyle":                           "'German, DMY'",
	"IntervalStyle":                       "iso_8601",
	"TimeZone":                            "'Asia/Kathmandu'",
	"bytea_output":                        "escape",
	"extra_float_digits":                  "-15",
	"client_min_messages":                 "debug1",
	"enable_seqscan":                      "off",
	"enable_indexscan":                    "off",
	"enable_bitmapscan":                   "off",
	"enable_nestloop":                     "off",
	"enable_hashjoin":                     "off",
	"plan_cache_mode":                     "force_generic_plan",
	"transform_null_equals":               "on",
	"array_nulls":                         "off",
	"quote_all_identifiers":               "on",
	"default_tablespace":                  "''",
	"check_function_bodies":               "off",
}

// Together returns all of them. A planner without its methods thinks every query
// so expensive that it compiles it, which takes longer than the timeouts here: no
// program of such a role would get anything done.
func Together() map[string]string {
	settings := maps.Clone(Hostile)
	settings["jit"] = "off"
	return settings
}
