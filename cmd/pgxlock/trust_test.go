package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// newRole makes a role that may create schemas.
func newRole(t *testing.T, db *pgtest.DB) (role string) {
	t.Helper()
	role = "pgxlock_test_" + strings.ToLower(rand.Text())
	db.Exec(t, "create role "+role)
	db.Exec(t, "do $$ begin execute format('grant create on database %I to "+role+"', current_database()); end $$")
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.Background(), "drop owned by "+role+" cascade; drop role "+role); err != nil {
			t.Error(err)
		}
	})
	return role
}

// Commands run as a superuser in databases where every role may make functions of its own.
func TestCommandsTrustNoStranger(t *testing.T) {
	t.Parallel()
	db := empty(t)
	t.Run("no operator of a stranger is called", func(t *testing.T) { attackInstallation(t, db) })
	t.Run("nothing of a stranger is called", func(t *testing.T) { attackCommands(t, db) })
	t.Run("a superuser is warned", func(t *testing.T) { warnSuperuser(t, db) })
}

// plant copies all functions and relations of the schema theirs to another one, or to itself, such
// that each of them runs theirs.planted() first.
const plant = `do $do$ declare o record; target text := '/* schema */'; begin
  for o in select pg_get_functiondef(p.oid) as definition from pg_proc p join pg_language l on l.oid = p.prolang
            where p.pronamespace = 'theirs'::regnamespace and l.lanname = 'plpgsql' and p.proname <> 'planted' loop
    execute regexp_replace(replace(o.definition, 'FUNCTION theirs.', 'FUNCTION ' || target || '.'), '\mBEGIN\M', 'BEGIN PERFORM theirs.planted();');
  end loop;
  for o in select c.relname, c.relkind from pg_class c where c.relnamespace = 'theirs'::regnamespace and c.relkind in ('r', 'v') loop
    if target = 'theirs' then
      execute format('alter %s theirs.%I rename to %I', case o.relkind when 'r' then 'table' else 'view' end, o.relname, 'was_' || o.relname);
    end if;
    execute format('create view %s.%I as select * from theirs.%I where theirs.planted()', target, o.relname, case target when 'theirs' then 'was_' else '' end || o.relname);
  end loop; end $do$`

// A role may have pg_catalog behind another schema, where operators of exactly these types come first.
func attackInstallation(t *testing.T, db *pgtest.DB) {
	t.Helper()
	evil := newRole(t, db)
	db.Exec(t, "create sequence compared; grant all on sequence compared to public; create schema fresh; create schema ops authorization "+evil)
	conn := db.Connect(t)
	for _, sql := range []string{
		"set role " + evil,
		`do $do$ declare o record; begin
			for o in select p.oprname, p.oprleft::regtype as l, p.oprright::regtype as r from pg_operator p
			          where p.oprname = '=' and p.oprleft in ('oid'::regtype, 'name'::regtype, 'text'::regtype) and p.oprright in (p.oprleft, 'text'::regtype) loop
				execute format('create function ops.same(%1$s, %2$s) returns boolean language plpgsql as $$ begin
					if current_setting(''transaction_read_only'') OPERATOR(pg_catalog.=) ''off'' then perform nextval(''public.compared''); end if;
					return $1 OPERATOR(pg_catalog.=) $2; end $$; create operator ops.= (function = ops.same, leftarg = %1$s, rightarg = %2$s)', o.l, o.r);
			end loop; end $do$`,
	} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	execute(t, []string{"DATABASE_URL=" + db.URL + "&search_path=ops,pg_catalog"}, "migrate", "up", "--schema", "fresh").want(t, exitOK, "", "installed")
	var ran bool
	if err := db.Pool.QueryRow(t.Context(), "select is_called from compared").Scan(&ran); err != nil || ran {
		t.Errorf("an operator of a stranger ran: %v", err)
	}
	db.Exec(t, "drop schema fresh, ops cascade")
}

func attackCommands(t *testing.T, db *pgtest.DB) {
	t.Helper()
	evil := newRole(t, db)
	execute(t, as(evil, db), "migrate", "up", "--schema", "theirs").want(t, exitOK, "", "installed")
	db.Exec(t, "create sequence ran; grant all on sequence ran to public")
	conn := db.Connect(t)
	exec := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec("set role " + evil + `; create function theirs.planted() returns boolean language plpgsql as $$ begin
		if current_setting('transaction_read_only') = 'off' then perform nextval('public.ran'); end if;
		raise exception 'what was planted ran'; end $$`)
	for _, schema := range []string{"pg_temp", "theirs"} {
		exec(strings.ReplaceAll(plant, "/* schema */", schema))
		const find = "alter function theirs.%s(varchar, varchar, integer, jsonb) rename to %s"
		if schema == "pg_temp" { // and not the other one
			exec(fmt.Sprintf(find, "acquire_lock", "hidden"))
		}
		for _, command := range []string{
			"ls", "tree", "evictions", "doctor", "reap --yes", "migrate status", "run -n k -- true", "acquire k --holder h", "release k --holder h",
			"claims purge --older-than 1h --dry-run", "step-down k", "runs", "runs forget k",
		} {
			r := execute(t, []string{"DATABASE_URL=" + db.URL}, strings.Fields(command)...)
			var ran bool
			if err := db.Pool.QueryRow(t.Context(), "select is_called from ran").Scan(&ran); err != nil || ran || strings.Contains(r.stdout+r.stderr, "planted") {
				t.Fatalf("%s ran what was planted in %s: %v\n%s%s", command, schema, err, r.stdout, r.stderr)
			}
			if schema == "theirs" && command == "acquire k --holder h" {
				r.want(t, exitInternal, "", `pgxlock: schema "theirs" is not trusted: role "`+evil+`" owns the function "acquire_in_turn" in it`)
				r.want(t, exitInternal, "", "name the schema if you trust its owner")
			}
		}
		if schema == "pg_temp" {
			exec(fmt.Sprintf(find, "hidden", "acquire_lock"))
		}
	}
	db.Exec(t, "drop schema theirs cascade")
}

func warnSuperuser(t *testing.T, db *pgtest.DB) {
	t.Helper()
	app := newRole(t, db)
	execute(t, as(app, db), "migrate", "up", "--schema", "theirs").want(t, exitOK, "", "installed")
	superuser := []string{"DATABASE_URL=" + db.URL}
	for _, command := range []string{"ls", "evictions", "runs", "run -n k --", "acquire k --holder h"} {
		args := append(strings.Fields(command), "--schema", "theirs")
		if strings.HasPrefix(command, "run") {
			args = []string{"run", "-n", "k", "--schema", "theirs", "--", "true"}
		}
		r := execute(t, superuser, args...)
		if r.code != exitOK || strings.Count(r.stderr, `warning: this role is a superuser and runs the code in schema "theirs", which role "`+app+`"`) != 1 {
			t.Errorf("%s: exit code %d\n%s", command, r.code, r.stderr)
		}
	}
	r := execute(t, superuser, "doctor", "--schema", "theirs")
	if !strings.Contains(r.stdout, "warning schema") || strings.Count(r.stdout+r.stderr, `role "`+app+`", that is none`) != 1 {
		t.Errorf("the doctor:\n%s%s", r.stdout, r.stderr)
	}
	execute(t, as(app, db), "evictions", "--schema", "theirs").want(t, exitOK, "EVICTED AT", "")
	execute(t, superuser, "evictions").want(t, exitInternal, "", "name the schema if you trust its owner")
	if _, err := db.Pool.Exec(t.Context(), "reassign owned by "+app+" to current_user"); err != nil {
		t.Fatal(err)
	}
	execute(t, superuser, "evictions", "--schema", "theirs").want(t, exitOK, "EVICTED AT", "")
}
