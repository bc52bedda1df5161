//go:build unix

package main

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// replaceFile writes a file as an agent that rotates passwords does: at once.
func replaceFile(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(name+".new", name); err != nil {
		t.Fatal(err)
	}
}

// The password, and the user, of the moment count for each connection: a command goes on over a
// rotation, also while the file is behind the server for a moment.
func TestRunOutlivesRotationsOfItsPassword(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{TCP: true})
	db := pgtest.DB{Pool: pgtest.Pool(t, server.URL("postgres")), URL: server.URL("postgres"), Name: "postgres"}
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	db.Exec(t, "create role app login password 'first'; create role app2 login password 'third'; select grant_locks('app', 'application'), grant_locks('app2', 'application')")
	as, err := url.Parse(server.TCPURL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	host, port := as.Hostname(), as.Port()
	passfile, services := filepath.Join(t.TempDir(), "pgpass"), filepath.Join(t.TempDir(), "services")
	service := func(user string) string {
		return fmt.Sprintf("[locks]\nhost=%s\nport=%s\ndbname=postgres\nuser=%s\nsslmode=disable\n", host, port, user)
	}
	replaceFile(t, services, service("app"))
	replaceFile(t, passfile, "*:*:*:app:first\n")
	conn := "service=locks servicefile=" + services + " passfile=" + passfile
	r := startRun(t, conn, "echo ready; cat", "--ttl", "30s", "k")
	r.says(t, "ready")
	connectedAs := func(user string) {
		t.Helper()
		pgtest.Until(t, "it is connected as "+user, func() bool {
			if said := r.stderr.String(); strings.Contains(said, "ending the command") {
				t.Fatalf("the lock is lost: %s", said)
			}
			var n int
			err := db.Pool.QueryRow(t.Context(), "select count(*) from pg_stat_activity where usename = $1", user).Scan(&n)
			return err == nil && n > 0
		})
	}
	terminate := func() {
		t.Helper()
		db.Exec(t, "select pg_terminate_backend(pid) from pg_stat_activity where usename like 'app%'")
	}

	db.Exec(t, "alter role app password 'second'")
	terminate()
	pgtest.Until(t, "the old password is refused", func() bool { return strings.Contains(r.stderr.String(), "28P01") })
	replaceFile(t, passfile, "*:*:*:app:second\n")
	connectedAs("app")

	replaceFile(t, passfile, "*:*:*:app2:third\n")
	replaceFile(t, services, service("app2"))
	db.Exec(t, "alter role app nologin")
	terminate()
	connectedAs("app2")

	_ = r.stdin.Close()
	r.ends(t, exitOK)
}

// Each command connects by the same configuration: one that asks again and again as well.
func TestReadAgainTakesCredentialsOfTheSamePlaceOnly(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	services, passfile := filepath.Join(dir, "services"), filepath.Join(dir, "pgpass")
	conn := "service=locks servicefile=" + services + " passfile=" + passfile
	const before = "[locks]\nhost=db1,db2\ndbname=d\nuser=u\nsslmode=disable\n"
	for name, test := range map[string]struct{ service, passfile, user, password string }{
		"nothing changed":          {before, "*:*:*:u:old", "u", "old"},
		"another password":         {before, "*:*:*:u:new", "u", "new"},
		"another user":             {"[locks]\nhost=db1,db2\ndbname=d\nuser=v\nsslmode=disable\n", "*:*:*:v:of v", "v", "of v"},
		"another server":           {"[locks]\nhost=db3,db2\ndbname=d\nuser=u\nsslmode=disable\n", "*:*:*:u:new", "u", "old"},
		"another second one":       {"[locks]\nhost=db1,db3\ndbname=d\nuser=u\nsslmode=disable\n", "*:*:*:u:new", "u", "old"},
		"another port":             {"[locks]\nhost=db1,db2\nport=1\ndbname=d\nuser=u\nsslmode=disable\n", "*:*:*:u:new", "u", "old"},
		"another database":         {"[locks]\nhost=db1,db2\ndbname=e\nuser=u\nsslmode=disable\n", "*:*:*:u:new", "u", "old"},
		"TLS where there was none": {"[locks]\nhost=db1,db2\ndbname=d\nuser=u\nsslmode=require\n", "*:*:*:u:new", "u", "old"},
		"half a service file":      {"[lo", "*:*:*:u:new", "u", "old"},
	} {
		replaceFile(t, services, before)
		replaceFile(t, passfile, "*:*:*:u:old")
		cmd := newLs()
		config, err := (&target{url: conn, flags: cmd.Flags(), stderr: cmd.ErrOrStderr}).config(reading)
		if err != nil {
			t.Fatal(err)
		}
		replaceFile(t, services, test.service)
		replaceFile(t, passfile, test.passfile)
		c := config.ConnConfig.Copy()
		c.RuntimeParams["application_name"] = "mine"
		if err := config.BeforeConnect(t.Context(), c); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if c.User != test.user || c.Password != test.password || c.Host != "db1" || c.Database != "d" || c.RuntimeParams["application_name"] != "mine" || c.ValidateConnect != nil != (config.ConnConfig.ValidateConnect != nil) {
			t.Errorf("%s: %s:%s at %s in %s", name, c.User, c.Password, c.Host, c.Database)
		}
	}
}
