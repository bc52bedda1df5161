package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
	"github.com/pgxlock/pgxlock/chaos/internal/judge"
	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// endsWithin is how long a worker may take to end once no fault is injected any more: a Release that gets no answer
// tries for 15 s, and Close waits for it.
const endsWithin = 45 * time.Second

// run runs rounds until their time is over, and returns how many were violations.
func run(ctx context.Context, cfg runConfig, out *log.Logger) (violations int, err error) {
	var possible []string
	for _, fault := range cfg.Faults {
		if why := missing(fault); why != "" {
			out.Printf("skipped: fault %s: %s", fault, why)
		} else {
			possible = append(possible, fault)
		}
	}
	if cfg.Faults = possible; len(possible) == 0 {
		return 0, errors.New("no fault is left")
	}
	dir := cfg.Dir
	if dir == "" {
		if dir, err = os.MkdirTemp("", "chaos-"); err != nil {
			return 0, err
		}
	}
	binaries, err := pgserver.Find()
	if err != nil {
		return 0, err
	}
	clusters := new(pgserver.Clusters)
	defer func() { err = errors.Join(err, clusters.Remove()) }()
	out.Printf("seed %d, %s, histories in %s", cfg.Seed, binaries, dir)
	var total judge.Report
	began := time.Now()
	for round := max(cfg.Round, 0); ctx.Err() == nil; round++ {
		if used := processorTime(); time.Since(began) > cfg.For || cfg.CPU > 0 && used > cfg.CPU {
			break
		}
		found, err := runRound(ctx, cfg, newPlan(cfg, round), clusters, filepath.Join(dir, fmt.Sprintf("round-%04d", round)), &total, out)
		if err != nil && ctx.Err() == nil {
			return violations, fmt.Errorf("round %d: %w\nrepeat it with: %s", round, err, cfg.repeat(round))
		}
		if found {
			violations++
		}
		if cfg.Round >= 0 || cfg.First && found {
			break
		}
	}
	if total.Runs > 0 {
		if err := total.Print(out.Writer()); err != nil {
			return violations, err
		}
	}
	out.Printf("%d rounds, %d of them violations, %s of processors", total.Runs, violations, processorTime().Round(time.Second))
	if violations == 0 && cfg.Dir == "" {
		return 0, os.RemoveAll(dir)
	}
	return violations, nil
}

// runRound runs a round and judges it. dir is removed unless there is a violation, or the folder of histories was named.
func runRound(ctx context.Context, cfg runConfig, p plan, clusters *pgserver.Clusters, dir string, total *judge.Report, out *log.Logger) (violation bool, err error) {
	sql := ""
	if p.SQL {
		sql = ", with SQL callers"
	}
	out.Printf("round %d: %s%s under %s; %d processes, %d callers each, %d keys, hold %s, TTL %s, %s",
		p.Round, p.Kind, sql, strings.Join(p.Faults, " and "), p.Workers, p.Callers, p.Keys, p.Hold, p.TTL, p.Role)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return false, err
	}
	errs, err := playRound(ctx, cfg, p, clusters, dir)
	if err != nil || ctx.Err() != nil {
		return false, err
	}
	events, err := history.Read(dir)
	if err != nil {
		return false, err
	}
	report, err := judge.Judge(events, dir)
	if err != nil {
		return false, fmt.Errorf("%s: %w", dir, err)
	}
	total.Add(report)
	out.Printf("  %d requests, %d checks", report.Asked, report.Checked())
	if len(errs)+report.Violations() > 0 {
		for _, err := range errs {
			out.Println("violation:", err)
		}
		err := report.Print(out.Writer())
		out.Printf("history: %s\nrepeat:  %s", dir, cfg.repeat(p.Round))
		return true, err
	}
	if cfg.Dir == "" {
		return false, os.RemoveAll(dir)
	}
	return false, nil
}

// playRound runs a round until its last process has ended. violations are of the processes.
func playRound(ctx context.Context, cfg runConfig, p plan, clusters *pgserver.Clusters, dir string) (violations []error, err error) {
	used := processorTime()
	stage, err := openStage(ctx, p, clusters)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stage.close()) }()
	w, err := history.Create(dir, "chaos")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	workers, err := startWorkers(p, stage.url(), dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, workers.killAll()) }() // which ended before, unless there was an error

	lasting, cancel := context.WithTimeout(ctx, p.Lasts)
	defer cancel()
	var ops atomic.Int64
	in := &injector{stage: stage, workers: workers, history: w, op: func() int64 { return ops.Add(1) }}
	failures := make([]error, len(p.Faults))
	var injecting, counting sync.WaitGroup
	for i, fault := range p.Faults {
		injecting.Go(func() { failures[i] = in.inject(lasting, fault, rand.New(rand.NewPCG(p.Seed, uint64(i)))) })
	}
	counting.Go(func() { countConnections(lasting, stage, w) })
	counting.Go(func() { stopAtCPU(lasting, cancel, used, cfg.CPU/time.Duration(len(cfg.Kinds))) })
	injecting.Wait()
	<-lasting.Done()
	counting.Wait()
	stage.heal()
	violations = workers.end(ctx, endsWithin)
	if err := errors.Join(failures...); err != nil {
		return nil, err
	}
	return violations, writeRemains(ctx, stage, w, workers.killed())
}
