// Package withserver is the program "with", which runs a command with a PostgreSQL server for
// its tests:
//
//	go run ./internal/pgserver/with go test ./...
//
// It decides once which server that is (see package choose), starts it, tells
// the command through PGXLOCK_TEST_DATABASE and PGXLOCK_TEST_SERVER, passes
// signals on to it, stops the server whatever happens, and exits with the
// command's code. If there is no server to be had, and it runs as root on Debian,
// it installs one with scripts/install-postgres first: run it in the project's
// root directory.
//
// With --throw-away it never takes a server that somebody else runs, and tells
// the command through PGXLOCK_DEMO_DATABASE and PGXLOCK_DEMO_SERVER instead: that
// is for the demo. With --container the server runs in a container, whatever the
// variables name: another one is taken only where there is no engine or no image,
// and PGXLOCK_TEST_CONTAINER says which it is.
//
// What tests use of servers is counted, and printed at the end with the seconds of processor
// time that the command, its children and the servers took. With --most a run fails that uses
// more: minutes differ from machine to machine, these numbers hardly do.
//
// The program is built in two modules from the same code: ./internal/pgserver/with
// knows the servers of this machine, and ./with of internal/containers starts
// containers as well, for which it links testcontainers-go.
package withserver

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgserver/choose"
)

const (
	installScript = "scripts/install-postgres"
	stopPatience  = 30 * time.Second

	// Exit codes of our own, as env and sh have them.
	exitUsage    = 2
	exitNoServer = 125
	exitNotFound = 127
	exitSignal   = 128 // plus the signal that ended the command
)

// Main is the program, with ways to a server beside the usual ones.
func Main(ways ...choose.Way) {
	os.Exit(program{ways: ways, names: forTests}.main(os.Args[1:]))
}

// A program is one call of it.
type program struct {
	ways      []choose.Way
	names     environment
	container bool // the server is to run in a container
	most      limits
}

// environment is the variables that tell the command of its server.
type environment struct{ url, description string }

var (
	forTests = environment{choose.DatabaseEnv, choose.ServerEnv}
	forDemo  = environment{"PGXLOCK_DEMO_DATABASE", "PGXLOCK_DEMO_SERVER"}
)

const usage = "usage: with [--throw-away | --container] [--most servers=N,connections=N,databases=N] [--] command [argument ...]"

// main returns the code to exit with. Unsetenv fails for malformed names only.
func (p program) main(args []string) int {
	flags := flag.NewFlagSet("with", flag.ContinueOnError)
	flags.SetOutput(os.Stderr)
	flags.Usage = func() { fmt.Fprintln(os.Stderr, usage) }
	throwAway := flags.Bool("throw-away", false, "")
	flags.BoolVar(&p.container, "container", false, "")
	flags.Func("most", "", p.most.set)
	if err := flags.Parse(args); err != nil {
		return exitUsage
	}
	args = flags.Args()
	if len(args) == 0 || *throwAway && p.container {
		flags.Usage()
		return exitUsage
	}
	if *throwAway {
		p.names = forDemo
		_ = os.Unsetenv(choose.DatabaseEnv)
	}
	if p.container {
		if len(p.ways) == 0 {
			fmt.Fprintln(os.Stderr, "with: this program starts no container: build ./with in internal/containers")
			return exitUsage
		}
		_ = os.Unsetenv(choose.DatabaseEnv)
		_ = os.Unsetenv(pgserver.BinDirEnv)
	}
	if p.names == forDemo {
		return p.with(args)
	}
	return p.counted(func() int { return p.with(args) })
}

// with runs the command with a server, and returns the code to exit with.
func (p program) with(args []string) int {
	// From here on no signal ends us before the server is stopped.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)

	if p.names == forTests {
		remove, err := pgserver.ShareClusters(context.Background())
		if err == nil { // otherwise each process that starts servers makes clusters of its own, or finds that it cannot
			defer func() {
				if err := remove(); err != nil {
					fmt.Fprintln(os.Stderr, "with:", err)
				}
			}()
		}
	}
	server, err := p.start(signals)
	if err != nil {
		fmt.Fprintln(os.Stderr, "with:", err)
		return exitNoServer
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), stopPatience)
		defer cancel()
		if err := server.Stop(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "with:", err)
		}
	}()
	if p.names == forTests { // the demo says it itself
		fmt.Fprintln(os.Stderr, server)
	}
	if p.container && !server.Container {
		fmt.Fprintln(os.Stderr, "with: no container:", strings.Join(server.PassedOver, "; "))
	}
	return p.run(args, server, signals)
}

// start starts the chosen server, and installs one if that is what it takes. A
// signal ends it.
func (p program) start(signals <-chan os.Signal) (*choose.Server, error) {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	go func() {
		select {
		case sig := <-signals:
			cancel(fmt.Errorf("got signal: %v", sig))
		case <-ctx.Done():
		}
	}()
	ways := slices.Clone(p.ways)
	for i, way := range ways {
		if p.container {
			ways[i] = choose.Required(way)
		}
	}
	server, err := choose.Start(ctx, ways...)
	if errors.Is(err, pgserver.ErrNoBinaries) && os.Geteuid() == 0 && isDebian() {
		install := exec.CommandContext(ctx, installScript)
		install.Stdout, install.Stderr = os.Stderr, os.Stderr
		if failed := install.Run(); failed != nil {
			return nil, fmt.Errorf("%w\n%s: %w", err, installScript, failed)
		}
		server, err = choose.Start(ctx, ways...)
	}
	return server, err
}

func isDebian() bool {
	_, err := os.Stat("/etc/debian_version")
	return err == nil
}

// run runs the command to its end.
func (p program) run(args []string, server *choose.Server, signals <-chan os.Signal) int {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(),
		p.names.url+"="+server.URL,
		p.names.description+"="+server.String())
	if server.Container || p.container {
		cmd.Env = append(cmd.Env, choose.ContainerEnv+"="+map[bool]string{true: "1", false: "0"}[server.Container])
	}
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "with:", err)
		return exitNotFound
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for {
		select {
		case sig := <-signals:
			_ = cmd.Process.Signal(sig) // fails only if the command has just ended
		case err := <-done:
			return exitCode(err)
		}
	}
}

// exitCode is the code of a command that ended with err.
func exitCode(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case !errors.As(err, &exit):
		fmt.Fprintln(os.Stderr, "with:", err)
		return 1
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return exitSignal + int(status.Signal())
	}
	return exit.ExitCode()
}
