package main

import (
	"bufio"
	"strings"
	"syscall"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// The sessions of the server are shared with others, whose statements run in what a
// command left there.
func TestSoakCommandsLeaveNothingInThePoolersSessions(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{})
	pgtest.EachPooler(t, server, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		each := pgtest.Soak(t, false, true)
		if mode != "transaction" && !each {
			return
		}
		env := []string{"DATABASE_URL=" + pooler.URL("postgres")}
		before := pgtest.ServerSessions(t, server, pooler)
		const whatever = -1
		token := ""
		for _, test := range []struct {
			args string
			code int
		}{
			{"migrate status", exitNotCurrent},
			{"migrate up", exitOK},
			{"migrate status", exitOK},
			{"migrate repair", exitOK},
			{"doctor", whatever}, // it warns of the pooler
			{"acquire k --holder me --ttl 5m", exitOK},
			{"acquire k --holder other --wait 10ms", exitBusy},
			{"extend k --holder me --ttl 5m --token TOKEN", exitOK},
			{"ls", exitOK},
			{"tree", exitOK},
			{"watch", whatever},
			{"migrate down", exitBusy},
			{"migrate up", exitOK},
			{"evict k --yes --reason test", exitOK},
			{"acquire k --holder me", exitOK},
			{"release k --holder me --token TOKEN", exitOK},
			{"reap", exitOK},
			{"run k -- true", exitOK},
			{"run k --kind advisory -- true", exitInternal}, // ErrPooler
			{"migrate down", exitOK},
		} {
			args := strings.Fields(strings.ReplaceAll(test.args, "TOKEN", token))
			if args[0] == "watch" {
				watchOnce(t, env)
			} else if r := execute(t, env, args...); test.code != whatever && r.code != test.code {
				t.Errorf("%s: exit code %d, want %d\n%s%s", test.args, r.code, test.code, r.stdout, r.stderr)
			} else if args[0] == "acquire" && r.code == exitOK {
				token, _, _ = strings.Cut(r.stdout, " ")
			} else if r.code == exitInternal && (!strings.Contains(r.stderr, "; connect to the server itself, or leave out --kind advisory") || strings.Contains(r.stderr, "Config.")) {
				t.Errorf("%s: it advises %s", test.args, r.stderr)
			}
			if each { // to tell which command it was
				pgtest.SameSessions(t, "pgxlock "+test.args, before, pgtest.ServerSessions(t, server, pooler))
			}
		}
		pgtest.SameSessions(t, "all of them", before, pgtest.ServerSessions(t, server, pooler))
	})
}

// A balancer sends to a standby what only reads, SHOW among it: no command may take its server for one, nor
// show the standby's lock table as the primary's.
func TestCommandsWorkBehindABalancer(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{})
	standby := pgtest.Standby(t, server, pgserver.Config{})
	url := pgtest.Balancer(t, server, standby, nil).URL("postgres")
	env := []string{"DATABASE_URL=" + url}
	on := func(args string) result { return execute(t, env, strings.Fields(args)...) }
	on("migrate up").want(t, exitOK, "", "installed")
	on("migrate status").want(t, exitOK, "current", "")
	if r := on("doctor"); !strings.Contains(r.stdout, "ok      primary      the primary") {
		t.Errorf("doctor: %s%s", r.stdout, r.stderr)
	}
	on("run k -- echo ran").want(t, exitOK, "ran\n", "")
	on("once k --every 1d -- echo ran").want(t, exitOK, "ran\n", "")
	leader := startLead(t, &pgtest.DB{URL: url}, trapping(obedient))
	leader.reports(t, "noticed by polling") // once the listener got no answer from itself
	_ = leader.stdin.Close()                // its command ends by itself
	leader.ends(t, exitOK)
	on("run k --kind advisory -- echo ran").want(t, exitInternal, "", "advisory locks do not work through a pooler")
	token, _, _ := strings.Cut(on("acquire k --holder me").stdout, " ")
	on("acquire k --holder you").want(t, exitBusy, "", "me")
	on("extend k --holder me --token "+token).want(t, exitOK, "T", "")
	on("step-down k").want(t, exitOK, "asked", "")

	direct := pgtest.Connect(t, server.URL("postgres"))
	if _, err := direct.Exec(t.Context(), "select pg_advisory_lock(7), acquire_lock('l', 'other', 3600)"); err != nil {
		t.Fatal(err)
	}
	on("ls --kind advisory").want(t, exitOK, "#7 ", "")
	on("ls").want(t, exitOK, "other", "")
	address := started(t, strings.TrimPrefix(env[0], "DATABASE_URL="))
	pgtest.Until(t, "the page shows both", func() bool {
		_, body := fetch(t, address)
		return strings.Contains(body, "#7") && strings.Contains(body, "other")
	})
	on("evict l --yes --reason why").want(t, exitOK, `evicted: lease "l" from other`, "")
	on("evictions").want(t, exitOK, "why", "")
	on("release k --holder me --token "+token).want(t, exitOK, "", "")
	on("reap").want(t, exitOK, "nothing to remove", "")
	on("claims purge --older-than 1h").want(t, exitOK, "nothing to remove", "")
	on("migrate down").want(t, exitBusy, "", "runs in schema public: 1")
}

// watchOnce ends a watch after its first snapshot.
func watchOnce(t *testing.T, env []string) {
	t.Helper()
	cmd := program(t, env, "watch", "-o", "json")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.HasPrefix(line, "{") {
		t.Errorf("watch: %q, %v", line, err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait() // ended by the signal
}
