//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestRunSaysWhyItsLockIsNotRenewedAndWhenItIsAgain(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{TCP: true})
	db := pgtest.DB{Pool: pgtest.Pool(t, server.URL("postgres")), URL: server.URL("postgres"), Name: "postgres"}
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	as, err := url.Parse(server.TCPURL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	password, _ := as.User.Password()
	as.User = url.UserPassword("app", password)
	db.Exec(t, "create role app login password '"+password+"'; select grant_locks('app', 'application')")
	// Each renewal is a third of the TTL later, and no pause of a machine is as long as the TTL.
	r := startRun(t, as.String(), "echo ready; cat", "--ttl", "2m", "k")
	r.says(t, "ready")
	says := func(text string, times int) {
		t.Helper()
		pgtest.Until(t, text, func() bool {
			said := r.stderr.String()
			if strings.Contains(said, "ending the command") {
				t.Fatalf("the lock is lost: %s", said)
			}
			return strings.Count(said, text) == times
		})
	}

	db.Exec(t, "alter role app connection limit 0")
	db.Exec(t, "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'")
	says("too many connections for role", 1)
	db.Exec(t, "alter role app connection limit -1")
	says(`the lock on "k" is renewed again`, 1)

	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	says("connection refused", 1)
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	says(`the lock on "k" is renewed again`, 2)

	_ = r.stdin.Close()
	r.ends(t, exitOK)
	address := hostPort(t, as.String())
	for line := range strings.Lines(r.stderr.String()) {
		why, held, failed := strings.Cut(line, "; trying again: the lock is held for another ")
		switch {
		case !failed && line == "pgxlock: the lock on \"k\" is renewed again\n":
		case !failed || !strings.HasPrefix(why, `pgxlock: renew "k": cannot connect as user "app" to database "postgres" at `+address+": ") || !strings.HasSuffix(held, "s, and the command is ended 20s before that\n"):
			t.Errorf("it said %q", line)
		}
	}
}

// refusedBy is the error of an attempt to connect to a server with that port, as pgx makes it.
func refusedBy(t *testing.T, port int, why error) error {
	t.Helper()
	config, err := pgconn.ParseConfig("host=127.0.0.1 user=u database=d sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	config.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Source: &net.TCPAddr{Port: port}, Err: why}
	}
	_, err = pgconn.ConnectConfig(t.Context(), config)
	return fmt.Errorf("pgxlock: renew: %w", err)
}

func TestEachCauseOfFailedRenewalsIsReportedOnceUntilOneSucceeds(t *testing.T) {
	t.Parallel()
	e := &task{key: "k", ttl: 30 * time.Second, grace: 5 * time.Second}
	e.target.flags = newRun().Flags()
	r := newRenewalReport()
	ended := &pgconn.PgError{Severity: "FATAL", Code: "57P01", Message: "terminating connection due to administrator command"}
	locked := fmt.Errorf("renew: %w", lockerr.ErrRowLocked)
	for i, step := range []struct {
		failed error
		says   string // "": nothing
	}{
		{nil, ""},
		{ended, "57P01"},
		{refusedBy(t, 1001, syscall.ECONNREFUSED), "connection refused; start the server"},
		{refusedBy(t, 1002, syscall.ECONNREFUSED), ""},
		{ended, ""},
		{fmt.Errorf("write from port 1003: %w", syscall.ECONNRESET), "connection reset"},
		{fmt.Errorf("write from port 1004: %w", syscall.ECONNRESET), ""},
		{refusedBy(t, 1005, syscall.EHOSTUNREACH), "no route to host"},
		{locked, "is locked by another transaction"},
		{locked, ""},
		{nil, `the lock on "k" is renewed again`},
		{nil, ""},
		{locked, "held for another 12s, and the command is ended 5.0s before that"},
		{nil, `the lock on "k" is renewed again`},
	} {
		if text := r.text(e, locked, 16*time.Second); text != "" && errors.Is(step.failed, lockerr.ErrRowLocked) {
			t.Errorf("%d: while there is time enough it says %q", i, text)
		}
		text := r.text(e, step.failed, 12*time.Second)
		if said := text != ""; said != (step.says != "") || !strings.Contains(text, step.says) || strings.Contains(text, "\n") {
			t.Errorf("%d: after %v it says %q, want %q", i, step.failed, text, step.says)
		}
	}
}

func TestReportThatIsBehindTellsTheNewestRenewal(t *testing.T) {
	t.Parallel()
	r := newRenewalReport()
	r.observe(t.Context(), pgxlock.Event{Op: pgxlock.EventAcquired})
	for _, err := range []error{errors.New("first"), errors.New("second"), nil} {
		r.observe(t.Context(), pgxlock.Event{Op: pgxlock.EventRenewed, Err: err}) // waits for nobody
	}
	r.observe(t.Context(), pgxlock.Event{Op: pgxlock.EventReleased})
	if e := <-r.events; e.Op != pgxlock.EventRenewed || e.Err != nil {
		t.Errorf("%v", e)
	}
}
