package main

import (
	"context"
	"crypto/rand"
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
	t.Run("nothing of a stranger is called", func(t *testing.T) { attackCommands(t, db) })
	t.Run("a superuser is warned", func(t *testing.T) { warnSuperuser(t, db) })
}

func attackCommands(t *testing.T, db *pgtest.DB) {
	t.Helper()
	evil := newRole(t, db)
	db.Exec(t, "create sequence ran; grant all on sequence ran to public; create schema theirs authorization "+evil)
	conn := db.Connect(t)
	if _, err := conn.Exec(t.Context(), "set role "+evil); err != nil {
		t.Fatal(err)
	}
	for _, schema := range []string{"pg_temp", "theirs"} {
		for _, sql := range []string{
			"create function /* schema */.acquire_lock(varchar, varchar, integer, jsonb) returns boolean language sql as $$ select nextval('public.ran') > 0 $$",
			"create function /* schema */.release_lock(varchar, varchar) returns boolean language sql as $$ select nextval('public.ran') > 0 $$",
			"create function /* schema */.pgxlock_version() returns bigint language sql as $$ select nextval('public.ran') * 0 + 8 $$",
			"create view /* schema */.lock_leases as select nextval('public.ran')",
			"create view /* schema */.pgxlock_evictions as select nextval('public.ran')",
			"create view /* schema */.pgxlock_claims as select nextval('public.ran'), null::timestamptz as expires_at",
		} {
			if _, err := conn.Exec(t.Context(), strings.ReplaceAll(sql, "/* schema */", schema)); err != nil {
				t.Fatal(err)
			}
		}
		for _, command := range []string{
			"ls", "tree", "evictions", "doctor", "reap --yes", "migrate status", "run -n k -- true", "acquire k --holder h", "release k --holder h",
			"claims purge --older-than 1h --dry-run", "step-down k",
		} {
			r := execute(t, []string{"DATABASE_URL=" + db.URL}, strings.Fields(command)...)
			var ran bool
			if err := db.Pool.QueryRow(t.Context(), "select is_called from ran").Scan(&ran); err != nil || ran {
				t.Fatalf("%s ran what was planted in %s: %v\n%s%s", command, schema, err, r.stdout, r.stderr)
			}
			if schema == "theirs" && command == "acquire k --holder h" {
				r.want(t, exitInternal, "", `pgxlock: schema "theirs" is not trusted: role "`+evil+`" owns the function "acquire_lock" in it`)
				r.want(t, exitInternal, "", "--schema names a schema")
			}
		}
	}
}

func warnSuperuser(t *testing.T, db *pgtest.DB) {
	t.Helper()
	app := newRole(t, db)
	execute(t, as(app, db), "migrate", "up", "--schema", "theirs").want(t, exitOK, "", "installed")
	superuser := []string{"DATABASE_URL=" + db.URL}
	for _, command := range []string{"ls", "evictions", "run -n k --", "acquire k --holder h"} {
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
	if !strings.Contains(r.stdout, "warning schema") || !strings.Contains(r.stdout, `role "`+app+`"`) {
		t.Errorf("the doctor:\n%s", r.stdout)
	}
	execute(t, as(app, db), "evictions", "--schema", "theirs").want(t, exitOK, "EVICTED AT", "")
	execute(t, superuser, "evictions").want(t, exitInternal, "", "--schema names a schema")
	if _, err := db.Pool.Exec(t.Context(), "reassign owned by "+app+" to current_user"); err != nil {
		t.Fatal(err)
	}
	execute(t, superuser, "evictions", "--schema", "theirs").want(t, exitOK, "EVICTED AT", "")
}
