package main

import (
	"cmp"
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// The roles that managed services give: docs/managed.md names the services.
func TestRolesOfManagedServicesInstallLockAndServe(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{})
	super := pgtest.Pool(t, server.URL("postgres"))
	exec := func(sql string) {
		t.Helper()
		if _, err := super.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	for name, test := range map[string]struct {
		role   string   // creates the role that installs
		schema string   // makes what it may create in, in its database
		as     string   // which role the programs have, "" for the same
		grants string   // what the installing role runs for them
		named  string   // the schema that the programs name, because another role owns the database
		blind  []string // the doctor's checks that warn
	}{
		"admin":  {"create role admin login createrole createdb; grant pg_monitor, pg_signal_backend to admin", "alter database admin owner to admin", "", "", "", nil},
		"app":    {"create role owner2 login createrole", "alter database app owner to owner2", "app", "create role app login; select grant_locks('app', 'application')", "", []string{"tokens", "expired", "runs", "snapshots"}},
		"single": {"create role single login", "grant create, usage on schema public to single", "", "", "", nil},
		"tenant": {"create role tenant login", "create schema tenant authorization tenant", "", "", "tenant", []string{"snapshots"}},
	} {
		t.Run(name, func(t *testing.T) {
			exec(test.role)
			exec("create database " + name)
			db := &pgtest.DB{URL: server.URL(name), Name: name, Pool: pgtest.Pool(t, server.URL(name))}
			db.Exec(t, test.schema)
			url := func(role string) string { return strings.Replace(server.URL(name), "postgres@", role+"@", 1) }
			owner := strings.Fields(test.role)[2]
			role := cmp.Or(test.as, owner)
			done := executeHere(t, url(owner), "migrate", "up")
			if name == "single" { // the owner of the schema could replace what single owns in it
				done.want(t, exitDenied, "", `nothing was installed in schema "public" of database "single": role "single" owns neither of them, so no program would trust what it installs; run CREATE SCHEMA locks AUTHORIZATION "single" as the owner`)
				if err := migrations.Up(t.Context(), pgtest.Pool(t, url(owner)), nil); err != nil {
					t.Fatal(err)
				}
				for _, flags := range [][]string{nil, {"--schema", "public"}} {
					done := executeHere(t, url(owner), append([]string{"acquire", "the job"}, flags...)...)
					if done.want(t, exitInternal, "", `schema "public" is not trusted: role "single" owns the`); !strings.Contains(done.stderr, "drop that, or change its owner") || strings.Contains(done.stderr, "migrate up") {
						t.Errorf("acquire: %+v", done)
					}
				}
				execute(t, []string{"DATABASE_URL=" + url(owner)}, "run", "the job", "--", "true").want(t, exitInternal, "", `pgxlock: acquire "the job": schema "public" is not trusted: role`)
				return
			}
			if done.code != exitOK {
				t.Fatalf("migrate up: %+v", done)
			}
			if test.grants != "" {
				if _, err := pgtest.Pool(t, url(owner)).Exec(t.Context(), test.grants); err != nil {
					t.Fatal(err)
				}
			}
			pool := pgtest.Pool(t, url(role))
			var flags []string
			if test.named != "" {
				flags = []string{"--schema", test.named}
			}

			lockers := map[string]func() (*pgxlock.Locker, error){
				"lease": func() (*pgxlock.Locker, error) {
					return pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{Schema: test.named})
				},
				"advisory": func() (*pgxlock.Locker, error) {
					return pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{Tokens: true, Schema: test.named})
				},
			}
			for kind, make := range lockers {
				locker, err := make()
				if err != nil {
					t.Fatal(err)
				}
				lock, err := locker.TryAcquire(t.Context(), "the key")
				if err != nil {
					t.Fatalf("%s: %v", kind, err)
				}
				if err := lock.Release(t.Context()); err != nil {
					t.Errorf("%s: %v", kind, err)
				}
				if err := locker.Close(t.Context()); err != nil {
					t.Errorf("%s: %v", kind, err)
				}
			}

			findings, err := doctor.Check(t.Context(), pool, &doctor.Config{Schema: test.named})
			if err != nil {
				t.Fatal(err)
			}
			var blind []string
			for _, f := range findings {
				switch {
				case f.Check == "durability": // tests switch fsync off
				case f.Status == doctor.StatusError:
					t.Errorf("doctor: %+v", f)
				case f.Status != doctor.StatusOK:
					blind = append(blind, f.Check)
				}
			}
			if fmt.Sprint(blind) != fmt.Sprint(test.blind) {
				t.Errorf("the doctor skips or warns of %v, want %v", blind, test.blind)
			}

			if done := executeHere(t, url(owner), append([]string{"acquire", "the job"}, flags...)...); done.code != exitOK {
				t.Fatalf("acquire: %+v", done)
			}
			address := servedBy(t, program(t, []string{"DATABASE_URL=" + url(owner)}, append([]string{"serve", "--listen", "127.0.0.1:0"}, flags...)...))
			pgtest.Until(t, "the page shows the lease", func() bool {
				_, body := fetch(t, address)
				return strings.Contains(body, "the job")
			})
		})
	}
}
