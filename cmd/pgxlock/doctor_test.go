package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestDoctorTellsAScriptHowItIs(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{Settings: map[string]string{"fsync": "on"}})
	url := server.URL("postgres")
	db := &pgtest.DB{Pool: pgtest.Pool(t, url), URL: url, Name: "postgres"}
	db.Exec(t, "create role owner login; alter database postgres owner to owner; grant pg_monitor to owner")
	env := []string{"DATABASE_URL=" + strings.Replace(url, "postgres@", "owner@", 1)}
	execute(t, env, "doctor").want(t, exitUnsound, "error   schema       this database has no pgxlock", "")
	execute(t, env, "doctor").want(t, exitUnsound, "-> run pgxlock migrate up, or name the schema (with --schema)\n", "")
	execute(t, env, "migrate", "up").want(t, exitOK, "", "installed, version")
	r := execute(t, env, "doctor", "--strict")
	r.want(t, exitOK, "ok      primary      the primary, PostgreSQL", "")
	if lines := strings.Split(strings.TrimSuffix(r.stdout, "\n"), "\n"); len(lines) != 25 || lines[24] != "24 ok" || strings.Contains(r.stdout, "\x1b") || strings.Contains(r.stdout, "->") {
		t.Errorf("want 24 findings and their summary, without colors and advice:\n%s", r.stdout)
	}

	db.Exec(t, "create role app login; create role mon login; grant pg_monitor to mon; select grant_locks('app', 'application'), grant_locks('mon', 'monitoring')")
	for role, skipped := range map[string]int{"app": 4, "mon": 1} { // who may do just what they are for
		r := execute(t, []string{"DATABASE_URL=" + strings.Replace(url, "postgres@", role+"@", 1)}, "doctor", "--strict")
		r.want(t, exitOK, fmt.Sprintf("\n%d ok, %d skipped\n", 24-skipped, skipped), "")
		r.want(t, exitOK, "skipped tokens       role \""+role+"\" may not check it: ERROR: permission denied for ", "")
		r.want(t, exitOK, "                     -> run it as role \"owner\"\n", "")
	}

	db.Exec(t, "alter database postgres set lock_timeout = '50ms'")
	execute(t, env, "doctor").want(t, exitOK, "warning timeouts     lock_timeout = 50ms (ALTER DATABASE)", "")
	execute(t, env, "doctor").want(t, exitOK, "\n23 ok, 1 warning\n", "")
	execute(t, env, "doctor", "--strict").want(t, exitUnsound, "                     -> Lockers' own connections set theirs", "")
	execute(t, env, "doctor", "--schema", "nowhere").want(t, exitUnsound, `error   schema       schema "nowhere" has no pgxlock`, "")

	conn := db.Connect(t)
	if _, err := conn.Exec(t.Context(), "begin; create table mine ()"); err != nil {
		t.Fatal(err)
	}
	execute(t, env, "doctor").want(t, exitOK, "ok      snapshots", "")
	execute(t, env, "doctor", "--long-transaction", "1ns").want(t, exitOK, "warning snapshots", "")

	r = execute(t, env, "doctor", "-o", "json")
	var findings []doctor.Finding
	if err := json.Unmarshal([]byte(r.stdout), &findings); err != nil || r.code != exitOK || len(findings) != 24 {
		t.Fatalf("%v, exit code %d:\n%s", err, r.code, r.stdout)
	}
	for _, f := range findings {
		if want := map[bool]doctor.Status{true: doctor.StatusWarning, false: doctor.StatusOK}[f.Check == "timeouts"]; f.Status != want || f.Detail == "" || f.Advice == "" != (want == doctor.StatusOK) {
			t.Errorf("%+v", f)
		}
	}
	if !strings.Contains(r.stdout, `"check": "timeouts",
    "status": "warning",
    "detail": "lock_timeout`) {
		t.Errorf("the names have changed:\n%s", r.stdout)
	}
}

func TestDoctorNamesTheRightsThatARoleLacks(t *testing.T) {
	t.Parallel()
	db := empty(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	role := "pgxlock_test_" + strings.ToLower(rand.Text())
	db.Exec(t, "create role "+role+"; grant insert on distributed_locks to "+role)
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.Background(), "drop owned by "+role+"; drop role "+role); err != nil {
			t.Error(err)
		}
	})
	r := execute(t, as(role, db), "doctor")
	r.want(t, exitUnsound, "error   rights       role \""+role+"\" lacks rights of application: DELETE, INSERT, ", "")
	r.want(t, exitUnsound, "public.grant_locks('"+role+"', 'application')\n", "")
	db.Exec(t, "select grant_locks('"+role+"', 'application')")
	execute(t, as(role, db), "doctor").want(t, exitUnsound, "skipped runs         role \""+role+"\" may not check it: ", "")
}

func TestSummaryCountsEachStatus(t *testing.T) {
	t.Parallel()
	for want, count := range map[string]map[doctor.Status]int{
		"18 ok":                       {doctor.StatusOK: 18},
		"17 ok, 4 skipped":            {doctor.StatusOK: 17, doctor.StatusSkipped: 4},
		"16 ok, 1 warning, 1 error":   {doctor.StatusOK: 16, doctor.StatusWarning: 1, doctor.StatusError: 1},
		"14 ok, 2 warnings, 3 errors": {doctor.StatusOK: 14, doctor.StatusWarning: 2, doctor.StatusError: 3},
		"0 ok, 1 error":               {doctor.StatusError: 1},
	} {
		if got := summary(count); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestDoctorWithoutADatabaseOrWithWrongUsageIsOneLine(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--database-url", "postgres://nobody@127.0.0.1:1/nowhere"}, exitUnavailable, "start the server, or correct the host and the port"},
		{[]string{"--database-url", "mysql://root@h/db"}, exitUsage, "not a PostgreSQL connection string"},
		{[]string{"--long-transaction", "0s"}, exitUsage, "--long-transaction is 0s"},
		{[]string{"--schema", "pg_x"}, exitUsage, "must not begin with pg_"},
		{[]string{"--schema", ""}, exitUsage, "--schema is empty"},
		{[]string{"me"}, exitUsage, `unexpected argument "me"`},
		{[]string{"-o", "yaml"}, exitUsage, "use table or json"},
	} {
		r := execute(t, nil, append([]string{"doctor"}, test.args...)...)
		if r.want(t, test.code, "", test.says); strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%v: not one line: %q", test.args, r.stderr)
		}
	}
}

func TestFindingIsPaintedByItsStatusAndObeyedByNoTerminal(t *testing.T) {
	t.Parallel()
	for status, color := range map[doctor.Status]string{doctor.StatusOK: green, doctor.StatusWarning: yellow, doctor.StatusError: red} {
		text := finding(true, 0, doctor.Finding{Check: "prepared", Status: status, Detail: "'\x1b[2J' is there", Advice: "ROLLBACK PREPARED '\x1b[2J'"})
		if !strings.HasPrefix(text, "\x1b["+color+"m"+string(status)) || strings.Contains(text, "\x1b[2J") || strings.Count(text, "\n") != 2 {
			t.Errorf("%q", text)
		}
	}
}

func TestFindingIsBrokenBetweenWordsBehindItsCheck(t *testing.T) {
	t.Parallel()
	found := doctor.Finding{Check: "pooler", Status: doctor.StatusOK, Detail: "no pooler in front of the server", Advice: "have the administrators restart it"}
	const want = "ok      pooler       no pooler in front\n" +
		"                     of the server\n" +
		"                     -> have the\n" +
		"                        administrators\n" +
		"                        restart it\n"
	if got := painted.ReplaceAllString(finding(true, 40, found), ""); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}
