package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

func TestFlagComesBeforeTheVariablesAndOursBeforeTheGeneralOne(t *testing.T) {
	t.Parallel()
	env := map[string]string{"PGXLOCK_DATABASE_URL": "ours", "DATABASE_URL": "general"}
	for _, test := range []struct{ flag, unset, source, value string }{
		{"flag", "", "--database-url", "flag"},
		{"", "", "PGXLOCK_DATABASE_URL", "ours"},
		{"", "PGXLOCK_DATABASE_URL", "DATABASE_URL", "general"},
		{"", "PGXLOCK_DATABASE_URL DATABASE_URL", "PG*", ""},
	} {
		getenv := func(name string) string {
			if strings.Contains(" "+test.unset+" ", " "+name+" ") {
				return ""
			}
			return env[name]
		}
		if source, value := sourceOf(test.flag, getenv); source != test.source || value != test.value {
			t.Errorf("flag %q without %q: %s %q, want %s %q", test.flag, test.unset, source, value, test.source, test.value)
		}
	}
}

func TestErrorsNameTheSourceOfTheConnectionAndNoPassword(t *testing.T) {
	t.Parallel()
	const url = "postgres://me:geheim@h/db"
	for _, test := range []struct {
		flag string
		env  map[string]string
		want string
	}{
		{url, map[string]string{"DATABASE_URL": url, "PGHOST": "h"}, "--database-url"},
		{"", map[string]string{"PGXLOCK_DATABASE_URL": url, "DATABASE_URL": url}, "PGXLOCK_DATABASE_URL"},
		{"", map[string]string{"DATABASE_URL": url + "?service=prod"}, `DATABASE_URL and of service "prod"`},
		{"", map[string]string{"DATABASE_URL": "password='a service=geheim'"}, "DATABASE_URL"},
		{"", map[string]string{"PGHOST": "h", "PGUSER": "me", "PGPASSWORD": "geheim"}, "PGHOST, PGUSER"},
		{"", map[string]string{"PGSERVICE": "prod", "PGPASSWORD": "geheim"}, `service "prod"`},
		{"", map[string]string{"PGPASSWORD": "geheim"}, "the defaults: --database-url, PGXLOCK_DATABASE_URL, DATABASE_URL and PG* name none"},
	} {
		if got := origin(test.flag, func(name string) string { return test.env[name] }); got != test.want {
			t.Errorf("flag %q, environment %v: %q, want %q", test.flag, test.env, got, test.want)
		}
	}
}

func TestEverySourceOfAConnectionStringLeadsToTheDatabase(t *testing.T) {
	t.Parallel()
	db := empty(t)
	c := db.Pool.Config().ConnConfig
	nowhere := "postgres://nobody@127.0.0.1:1/nowhere"
	installed := func(name string, env []string, args ...string) {
		t.Helper()
		if r := execute(t, env, append([]string{"migrate", "status"}, args...)...); r.code != exitNotCurrent || !strings.Contains(r.stdout, "not installed") {
			t.Errorf("%s: %+v", name, r)
		}
	}
	installed("flag", []string{"PGXLOCK_DATABASE_URL=" + nowhere, "DATABASE_URL=" + nowhere, "PGHOST=/nowhere"}, "--database-url", db.URL)
	installed("PGXLOCK_DATABASE_URL", []string{"PGXLOCK_DATABASE_URL=" + db.URL, "DATABASE_URL=" + nowhere, "PGHOST=/nowhere"})
	installed("DATABASE_URL", []string{"PGXLOCK_DATABASE_URL=", "DATABASE_URL=" + db.URL, "PGHOST=/nowhere"})
	installed("PG*", []string{"PGHOST=" + c.Host, fmt.Sprint("PGPORT=", c.Port), "PGUSER=" + c.User, "PGPASSWORD=" + c.Password, "PGDATABASE=" + c.Database})
}

func TestDefaultsFillInWhatWasLeftOpen(t *testing.T) {
	t.Parallel()
	config, err := parseConfig("test", "postgres://u@h/d")
	if err != nil {
		t.Fatal(err)
	}
	if config.ConnConfig.ConnectTimeout != defaultConnectTimeout {
		t.Errorf("default: %s", config.ConnConfig.ConnectTimeout)
	}
	config, err = parseConfig("test", "postgres://u@h/d?application_name=mine&connect_timeout=3")
	if err != nil {
		t.Fatal(err)
	}
	if name := config.ConnConfig.RuntimeParams["application_name"]; name != "mine" || config.ConnConfig.ConnectTimeout.Seconds() != 3 {
		t.Errorf("given: %q, %s", name, config.ConnConfig.ConnectTimeout)
	}
}

// closed is an address where nobody listens: of a port that nobody is given who asks for
// a free one, as other tests do meanwhile.
const closed = "127.0.0.1:1"

// nowhere is a database that is not there.
const nowhere = "postgres://me@" + closed + "/db"

func TestServerThatCannotBeReachedExits69(t *testing.T) {
	t.Parallel()
	for _, args := range []string{"ls", "migrate up", "migrate down", "migrate status", "migrate repair", "tree", "doctor", "acquire k"} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()
			r := execute(t, []string{"DATABASE_URL=postgres://me:geheim@" + closed + "/db"}, strings.Fields(args)...)
			r.want(t, exitUnavailable, "", "connection refused")
			if strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, "--database-url") {
				t.Errorf("not one line that says what to do: %q", r.stderr)
			}
			if strings.Count(r.stderr, "connection refused") != 1 { // pgx tries twice, with TLS and without
				t.Errorf("it says it twice: %q", r.stderr)
			}
		})
	}
}

func TestPasswordsAreNeverPrinted(t *testing.T) {
	t.Parallel()
	for _, connString := range []string{
		"postgres://me:geheim@" + closed + "/db",
		"postgres://me:geheim",
		"postgres://me:ge:heim%zz@h/db",
		"postgres://me:geheim@h:port/db",
		"postgres://me:geheim@h/db?sslmode=perhaps",
		"postgres://me@h/db?password=geheim&connect_timeout=soon",
		"host=h password=geheim port=much",
		"host=h password='geheim",
		"me:geheim@h",
		"mysql://me:geheim@h/db",
	} {
		r := execute(t, []string{"DATABASE_URL=" + connString}, "ls")
		if r.code != exitUsage && r.code != exitUnavailable {
			t.Errorf("%s: exit code %d: %s", connString, r.code, r.stderr)
		}
		if out := r.stdout + r.stderr; strings.Contains(out, "geheim") || strings.Contains(out, "heim%") {
			t.Errorf("%s: %s", connString, out)
		}
	}
}

func TestCommandsNameTheirConnectionsUnlessTheConnectionStringDoes(t *testing.T) {
	t.Parallel()
	db := empty(t)
	for _, want := range []string{"pgxlock", "mine"} {
		var target target
		target.addFlags(new(cobra.Command))
		target.url = db.URL
		if want == "mine" {
			target.url += "&application_name=mine"
		}
		pool, err := target.connect(t.Context(), reading)
		if err != nil {
			t.Fatal(err)
		}
		var name string
		if err := pool.QueryRow(t.Context(), "show application_name").Scan(&name); err != nil || name != want {
			t.Errorf("%q, want %q: %v", name, want, err)
		}
		pool.Close()
	}
}
