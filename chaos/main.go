// Command chaos tries to break pgxlock, and judges what it saw.
//
//	chaos -for 10m -seed 7 -kind lease,permit -fault kill,cut
//
// A run is a sequence of rounds. Each round has a PostgreSQL server of its own, a relay before it, and
// 1 to 4 worker processes whose callers lock, write, release and give up, while one or two kinds of
// faults are injected. Every process writes a history, which package judge judges at the end of the
// round. The seed determines what is done and in which order; when it happens is the machine's.
//
//	plan.go      what the seed draws for a round
//	round.go     a round from its start to its verdict
//	stage.go     the server, its standby and pooler, and the relays before them
//	faults.go    what is done to them
//	workers.go   starting, killing, freezing and ending worker processes
//	remains.go   what the server shows while a round runs and when it is over
//	worker.go    a worker process and its callers
//	holds.go     callers of leases, advisory locks, permits and sets
//	calls.go     callers of DoTx and Lead
//	sqlcalls.go  SQL callers that wait in turn, beside those of Lockers
//	deeds.go     callers of claims, runs, limits and transaction locks
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/pgxlock/pgxlock/chaos/internal/judge"
	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// A runConfig is what the command line says.
type runConfig struct {
	For    time.Duration // no round begins later
	Lasts  time.Duration // of a round
	CPU    time.Duration // all rounds together use about so much of the processors; 0: any
	Seed   uint64
	Round  int // only this one, if not negative
	Kinds  []string
	Faults []string
	Dir    string // of the histories; empty: a temporary one
	First  bool   // end at the first violation
	Broken string // what of the workers is broken on purpose
}

func main() {
	if os.Getenv(workerEnv) != "" {
		os.Exit(workerMain())
	}
	os.Exit(chaos(os.Args[1:], log.New(os.Stdout, "", 0)))
}

// chaos is the program, and returns its exit code: 1 if a round was judged a violation.
func chaos(args []string, out *log.Logger) int {
	cfg := runConfig{Round: -1}
	flags := flag.NewFlagSet("chaos", flag.ContinueOnError)
	flags.SetOutput(out.Writer())
	flags.DurationVar(&cfg.For, "for", 10*time.Minute, "begin no round later")
	flags.DurationVar(&cfg.Lasts, "lasts", 12*time.Second, "how long a round lasts")
	flags.DurationVar(&cfg.CPU, "cpu", 0, "end after this much time of processors, with small rounds that each use a part of it (default: any)")
	flags.Uint64Var(&cfg.Seed, "seed", uint64(time.Now().UnixNano()), "determines what the rounds do")
	flags.IntVar(&cfg.Round, "round", -1, "run only this round of the seed")
	kinds := flags.String("kind", strings.Join(allKinds, ","), "kinds of locks, a round for each")
	faults := flags.String("fault", strings.Join(allFaults, ","), "faults, one or two for each round")
	flags.StringVar(&cfg.Dir, "dir", "", "keep the histories in this folder")
	flags.BoolVar(&cfg.First, "first", false, "end at the first violation")
	flags.StringVar(&cfg.Broken, "broken", "", "break the workers on purpose: "+strings.Join(allBroken, ", "))
	judged := flags.String("judge", "", "run nothing, but judge the histories in this folder and below it again")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	if *judged != "" {
		return judgeAgain(*judged, out)
	}
	cfg.Kinds, cfg.Faults = strings.Split(*kinds, ","), strings.Split(*faults, ",")
	if err := cfg.check(); err != nil {
		out.Println("chaos:", err)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	violations, err := run(ctx, cfg, out)
	switch {
	case err != nil:
		out.Println("chaos:", err)
		return 2
	case violations > 0:
		return 1
	}
	return 0
}

// judgeAgain judges histories that an earlier run has kept.
func judgeAgain(dir string, out *log.Logger) int {
	report, err := judge.Folder(dir, out.Writer())
	switch {
	case err != nil:
		out.Println("chaos:", err)
		return 2
	case report.Violations() > 0:
		return 1
	}
	return 0
}

func (c *runConfig) check() error {
	var errs []error
	known := func(name string, values, all []string) {
		for _, v := range values {
			if !slices.Contains(all, v) {
				errs = append(errs, fmt.Errorf("-%s %q is none of %s", name, v, strings.Join(all, ",")))
			}
		}
	}
	known("kind", c.Kinds, allKinds)
	known("fault", c.Faults, allFaults)
	if c.Broken != "" {
		known("broken", []string{c.Broken}, allBroken)
	}
	return errors.Join(errs...)
}

// repeat returns the command that repeats a round.
func (c *runConfig) repeat(round int) string {
	args := fmt.Sprintf("-seed %d -round %d -lasts %s -kind %s -fault %s", c.Seed, round, c.Lasts, strings.Join(c.Kinds, ","), strings.Join(c.Faults, ","))
	if c.CPU > 0 {
		args += fmt.Sprintf(" -cpu %s", c.CPU)
	}
	if c.Broken != "" {
		args += " -broken " + c.Broken
	}
	command := fmt.Sprintf("make chaos CHAOS='%s'", args)
	if dir := os.Getenv(pgserver.BinDirEnv); dir != "" {
		return pgserver.BinDirEnv + "=" + dir + " " + command
	}
	return command
}
