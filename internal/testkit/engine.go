package testkit

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// KeepNoLocks makes the database one of an engine whose advisory functions grant every lock and keep
// none, as YugabyteDB before 2.25 and CockroachDB before 26.3 may be set to. The role must be a
// superuser. A function of PostgreSQL's that is only replaced keeps its C code, so each is renamed
// and made anew.
func KeepNoLocks(t *testing.T, db *pgtest.DB) {
	t.Helper()
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `
		set local allow_system_table_mods = on;
		do $$
		declare f record;
		begin
		  for f in select p.proname, pg_get_function_identity_arguments(p.oid) as args, pg_get_function_result(p.oid) as result
		             from pg_proc p where p.pronamespace = 'pg_catalog'::regnamespace and p.proname ~ '^pg_(try_)?advisory_' loop
		    execute format('alter function pg_catalog.%I(%s) rename to %I', f.proname, f.args, 'real_' || f.proname);
		    execute format('create function pg_catalog.%I(%s) returns %s language sql volatile as %L',
		      f.proname, f.args, f.result, case f.result when 'boolean' then 'select true' else 'select' end);
		  end loop;
		end $$`); err != nil {
		t.Fatal(err)
	}
	Commit(t, tx)
	db.Pool.Reset() // what its sessions have planned calls the real ones
}

// Citus gives the database the catalogs that Citus has on a node of that group, 0 for the coordinator,
// of a cluster with one worker.
func Citus(t *testing.T, db *pgtest.DB, group int, metadata bool) {
	t.Helper()
	db.Exec(t, fmt.Sprintf(`set allow_system_table_mods = on;
		create table pg_catalog.pg_dist_local_group (groupid int not null primary key);
		create table pg_catalog.pg_dist_node (nodeid int primary key, groupid int not null, hasmetadata boolean not null);
		grant select on pg_catalog.pg_dist_local_group, pg_catalog.pg_dist_node to public;
		insert into pg_catalog.pg_dist_local_group values (%d);
		insert into pg_catalog.pg_dist_node values (1, 0, true), (2, 1, %t);
		set allow_system_table_mods = off`, group, metadata))
}
