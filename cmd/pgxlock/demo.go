package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/migrations"
)

const (
	// demoPatience bounds the demonstration, which takes a small part of it on any machine.
	demoPatience = 15 * time.Minute
	stopPatience = 30 * time.Second
)

// demoIntroduction says what there is to see.
const demoIntroduction = `Worker processes compete for locks, are killed, and freeze; every lock comes with a fencing token,
a number that grows with each holder, by which the database refuses the write of one that comes back too late.
`

func newDemo() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show locks at work, on a throw-away PostgreSQL",
		Long: `Show locks at work on a throw-away PostgreSQL of its own: processes that compete, one
that is killed, one that freezes and comes back too late, SQL callers beside Go
callers. demo checks what it shows, and fails if a claim is false.

demo touches no database of yours: it ignores DATABASE_URL and the PG* variables. It
needs PostgreSQL's server programs on this machine.`,
		Example: "  pgxlock demo",
		Args:    noArguments,
		RunE:    func(cmd *cobra.Command, _ []string) error { return runDemo(cmd) },
	}
	cmd.AddCommand(newDemoWorker())
	return cmd
}

func runDemo(cmd *cobra.Command) (err error) {
	given := &demoServer{url: os.Getenv(demoDatabaseEnv), description: os.Getenv(demoServerEnv)}
	if err := forgetDatabases(); err != nil {
		return err
	}
	// Asked for, this signal does not end us: a reader who has seen enough must not
	// keep us from stopping the server.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, stop := context.WithCancelCause(cmd.Context())
	defer stop(nil)
	ctx, cancel := context.WithTimeoutCause(ctx, demoPatience, fmt.Errorf("the demonstration was not over after %s", demoPatience))
	defer cancel()
	d := &demo{out: cmd.OutOrStdout(), palette: colors(cmd), stop: stop}
	begun := time.Now()
	d.print(demoIntroduction)
	server := given
	if given.url == "" {
		d.say("Starting a throw-away PostgreSQL ...")
		if server, err = startDemoServer(ctx); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, server.stop()) }()
	}
	d.say("%s", server.description)
	if err := d.play(ctx, server.url); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return err
	}
	d.section(fmt.Sprintf("All %d claims checked, in %s", d.claims, brief(time.Since(begun))))
	return nil
}

// What `make demo` says of the throw-away server that it started, so that a
// machine without PostgreSQL's programs can show the demonstration in Docker.
const (
	demoDatabaseEnv = "PGXLOCK_DEMO_DATABASE"
	demoServerEnv   = "PGXLOCK_DEMO_SERVER"
)

// demoServer is the throw-away server.
type demoServer struct {
	url, description string
	stop             func() error
}

func startDemoServer(ctx context.Context) (*demoServer, error) {
	server, err := pgserver.Start(ctx, pgserver.Config{})
	if err != nil {
		return nil, err
	}
	return &demoServer{server.URL("postgres"), server.Description(), func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopPatience)
		defer cancel()
		return server.Stop(ctx)
	}}, nil
}

// forgetDatabases takes every database of the user's out of the environment:
// pgx would mix PGSERVICE, PGOPTIONS and the like into our own connections.
func forgetDatabases() error {
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, "PG") || name == "DATABASE_URL" {
			if err := os.Unsetenv(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// demo is one performance.
type demo struct {
	out     io.Writer
	palette palette
	stop    context.CancelCauseFunc
	pool    *pgxpool.Pool
	team    *team
	held    []held // what must be in the list at the end, by name
	claims  int    // how many were found true

	victimTTL time.Duration
}

// play migrates the database at url, and shows and checks everything.
func (d *demo) play(ctx context.Context, url string) error {
	config, err := parseConfig("the server's address", url)
	if err != nil {
		return err
	}
	if d.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	defer d.pool.Close()
	if err := migrations.Up(ctx, d.pool, nil); err != nil {
		return err
	}
	d.say("pgxlock installed, as by: pgxlock migrate up")
	return d.acts(ctx, url)
}

// acts shows and checks everything on a migrated database.
func (d *demo) acts(ctx context.Context, url string) error {
	if _, err := d.pool.Exec(ctx, statement("demo_tables", "")); err != nil {
		return err
	}
	var err error
	if d.team, err = startTeam(url, "worker-1", "worker-2", "worker-3", "worker-4"); err != nil {
		return err
	}
	defer d.team.stop()
	for _, act := range []func(context.Context) error{d.compete, d.crash, d.freeze, d.mix, d.list} {
		if err := act(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (d *demo) section(title string) {
	d.print("\n" + d.palette.paint(bold, title))
}

func (d *demo) say(format string, args ...any) {
	d.print("  " + fmt.Sprintf(format, args...))
}

// act says what somebody did, and what came of it.
func (d *demo) act(who, format string, args ...any) {
	d.print("  " + d.palette.paint(cyan, fmt.Sprintf("%-9s", who)) + " " + fmt.Sprintf(format, args...))
}

// claim says whether a claim is true, and makes the demonstration fail if not.
func (d *demo) claim(text string, untrue error) error {
	if untrue != nil {
		d.print("  " + d.palette.paint(red, "UNTRUE") + "  " + text)
		return fmt.Errorf("untrue: %s: %w", text, untrue)
	}
	d.print("  " + d.palette.paint(green, "ok") + "  " + text)
	d.claims++
	return nil
}

// print ends the demonstration when nobody reads any more.
func (d *demo) print(line string) {
	if _, err := fmt.Fprintln(d.out, line); err != nil {
		d.stop(err)
	}
}
