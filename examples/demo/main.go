// Demo shows locks at work, and checks what it shows: processes that compete, one that is
// killed, one that freezes and comes back too late, SQL callers beside Go callers.
//
//	make demo
//
// It runs on the throw-away server that `with --throw-away` starts, and fails if a claim is
// false. Read acts.go first.
package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/migrations"
)

// `with --throw-away` names its server in these variables.
const (
	databaseEnv = "PGXLOCK_DEMO_DATABASE"
	serverEnv   = "PGXLOCK_DEMO_SERVER"
)

// patience bounds the demonstration, which takes a small part of it on any machine.
const patience = 15 * time.Minute

// introduction says what there is to see.
const introduction = `Worker processes compete for locks, are killed, and freeze; every lock comes with a fencing token,
a number that grows with each holder, by which the database refuses the write of one that comes back too late.
`

//go:embed tables.sql
var tables string

func main() {
	log.SetFlags(0)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if len(os.Args) == 4 && os.Args[1] == "worker" {
		err = work(ctx, os.Args[2], os.Args[3], os.Stdin, os.Stdout)
	} else {
		err = run(ctx)
	}
	if err != nil {
		log.Fatal("demo: ", err)
	}
}

func run(ctx context.Context) error {
	url, server := os.Getenv(databaseEnv), os.Getenv(serverEnv)
	if url == "" || len(os.Args) > 1 {
		return errors.New("it takes no arguments, and needs a throw-away server: run make demo")
	}
	if err := forgetDatabases(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("the demonstration was not over after %s", patience))
	defer cancel()
	d := &demo{out: os.Stdout, colors: colors()}
	begun := time.Now()
	d.print(introduction)
	d.say("%s", server)
	if err := d.play(ctx, url); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return err
	}
	d.section(fmt.Sprintf("All %d claims checked, in %s", d.claims, brief(time.Since(begun))))
	return nil
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
	out    io.Writer
	colors bool
	pool   *pgxpool.Pool
	team   *team
	held   []held // what must be in the list at the end, by name
	claims int    // how many were found true

	victimTTL time.Duration
}

// play migrates the database at url, and shows and checks everything.
func (d *demo) play(ctx context.Context, url string) (err error) {
	if d.pool, err = pgxpool.New(ctx, url); err != nil {
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
	if _, err := d.pool.Exec(ctx, tables); err != nil {
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
	d.print("\n" + d.paint(bold, title))
}

func (d *demo) say(format string, args ...any) {
	d.print("  " + fmt.Sprintf(format, args...))
}

// act says what somebody did, and what came of it.
func (d *demo) act(who, format string, args ...any) {
	d.print("  " + d.paint(cyan, fmt.Sprintf("%-9s", who)) + " " + fmt.Sprintf(format, args...))
}

// claim says whether a claim is true, and makes the demonstration fail if not.
func (d *demo) claim(text string, untrue error) error {
	if untrue != nil {
		d.print("  " + d.paint(red, "UNTRUE") + "  " + text)
		return fmt.Errorf("untrue: %s: %w", text, untrue)
	}
	d.print("  " + d.paint(green, "ok") + "  " + text)
	d.claims++
	return nil
}

// print needs no error: a write to a closed standard output ends the program.
func (d *demo) print(line string) { _, _ = fmt.Fprintln(d.out, line) }

// Escape sequences of ECMA-48, "select graphic rendition".
const (
	bold   = "1"
	red    = "31"
	green  = "32"
	yellow = "33"
	cyan   = "36"
)

func (d *demo) paint(color, text string) string {
	if !d.colors {
		return text
	}
	return "\x1b[" + color + "m" + text + "\x1b[0m"
}

// colors reports whether standard output is a terminal whose reader wants colors (https://no-color.org).
func colors() bool {
	info, err := os.Stdout.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// brief rounds a duration to what people want to know of it.
func brief(d time.Duration) string {
	if d.Abs() < time.Second {
		return d.Round(time.Millisecond).String()
	}
	return fmt.Sprintf("%.1fs", d.Seconds())
}
