//go:build unix

// Testrun builds all test programs of some modules, and then runs them:
//
//	testrun -build [-race] [-only REGEXP] DIR . cmd/pgxlock
//	                                              builds into DIR, and says how long it took
//	testrun [-only REGEXP] DIR [-test.short ...]  runs what is there, each in the folder of its package
//
// go test does both at once: on a slow machine the tests would compete with the compiler, and a
// test that fails would have a compiler to blame. Each program's result is a line as go test
// prints it, and the output of one that failed stands before its line. Of all tests as many run
// at once as there are processors.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	build := flag.Bool("build", false, "build the test programs of the modules in these directories")
	race := flag.Bool("race", false, "build with the race detector")
	only := flag.String("only", "", "build or run the packages whose paths match this regular expression")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: testrun -build [-race] [-only REGEXP] DIR MODULE ... | testrun [-only REGEXP] DIR [-test.FLAG ...]")
	}
	flag.Parse()
	args := flag.Args()
	if len(args) == 0 || *build && len(args) == 1 {
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if *build {
		err = buildAll(ctx, args[0], *only, args[1:], *race)
	} else {
		err = runAll(ctx, args[0], *only, args[1:], os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
		os.Exit(1)
	}
}

// A program is the tests of a package. Its file is DIR/MODULE/N/NAME.test beside a file
// NAME.test.package, which holds the package's path and folder.
type program struct {
	file, path, folder string
	size               int64 // of its test files: the more of them, the longer it takes
}

// list returns the packages of a module that have tests and a path that matches.
func list(ctx context.Context, module string, match *regexp.Regexp) (all []program, err error) {
	const format = `{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}	{{.Dir}}{{end}}`
	cmd := exec.CommandContext(ctx, "go", "list", "-f", format, "./...")
	cmd.Dir, cmd.Stderr = module, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list in %s: %w", module, err)
	}
	for line := range strings.Lines(string(out)) {
		if path, folder, _ := strings.Cut(strings.TrimSpace(line), "\t"); match.MatchString(path) {
			all = append(all, program{path: path, folder: folder})
		}
	}
	return all, nil
}

// buildAll builds the test programs. go test -c writes a program into a directory under the last
// part of its package's path, so that each directory has one of each name.
func buildAll(ctx context.Context, dir, only string, modules []string, race bool) error {
	began := time.Now()
	match, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	dir, err = filepath.Abs(dir)
	if err != nil {
		return err
	}
	count := 0
	for i, module := range modules {
		packages, err := list(ctx, module, match)
		if err != nil {
			return err
		}
		for n := 0; len(packages) > 0; n++ {
			var these, rest []program
			for _, p := range packages {
				if slices.ContainsFunc(these, func(other program) bool { return name(other.path) == name(p.path) }) {
					rest = append(rest, p)
				} else {
					these = append(these, p)
				}
			}
			if err := buildSome(ctx, filepath.Join(dir, fmt.Sprint(i), fmt.Sprint(n)), module, these, race); err != nil {
				return err
			}
			count += len(these)
			packages = rest
		}
	}
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &used); err != nil {
		return err
	}
	fmt.Printf("Built %d test programs in %.0f s, with %.0f s of processor time.\n", count, time.Since(began).Seconds(), seconds(used))
	return nil
}

func seconds(used syscall.Rusage) float64 {
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds()
}

// name is what go test -c calls the program of a package.
func name(path string) string { return filepath.Base(path) + ".test" }

func buildSome(ctx context.Context, dir, module string, packages []program, race bool) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// Debug information is a third of the linker's work. Make lint vets.
	args := []string{"test", "-c", "-vet=off", "-ldflags=-s -w", "-o", dir + string(filepath.Separator)}
	if race {
		args = append(args, "-race")
	}
	for _, p := range packages {
		args = append(args, p.path)
		about := filepath.Join(dir, name(p.path)+".package")
		if err := os.WriteFile(about, []byte(p.path+"\n"+p.folder), 0o644); err != nil {
			return err
		}
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = module, os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go test -c in %s: %w", module, err)
	}
	return nil
}

// built returns the programs in the directory of packages that match, those first that take longest.
func built(dir, only string) (all []program, err error) {
	match, err := regexp.Compile(only)
	if err != nil {
		return nil, err
	}
	abouts, err := filepath.Glob(filepath.Join(dir, "*", "*", "*.test.package"))
	if err != nil {
		return nil, err
	}
	for _, about := range abouts {
		text, err := os.ReadFile(about)
		if err != nil {
			return nil, err
		}
		path, folder, _ := strings.Cut(string(text), "\n")
		if !match.MatchString(path) {
			continue
		}
		p := program{file: strings.TrimSuffix(about, ".package"), path: path, folder: folder}
		if p.file, err = filepath.Abs(p.file); err != nil {
			return nil, err
		}
		files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			if info, err := os.Stat(file); err == nil {
				p.size += info.Size()
			}
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b program) int { return int(b.size - a.size) })
	if len(all) == 0 {
		return nil, fmt.Errorf("no test programs in %s whose packages match %q", dir, only)
	}
	return all, nil
}

// runAll runs the programs, several at once, and writes their results.
func runAll(ctx context.Context, dir, only string, flags []string, to io.Writer) error {
	programs, err := built(dir, only)
	if err != nil {
		return err
	}
	// Together as many tests as processors, of two programs at least: many have tests that do not
	// run beside each other.
	processors := runtime.NumCPU()
	atOnce := max(2, processors/2)
	args := append([]string{
		"-test.paniconexit0", "-test.shuffle=on", "-test.timeout=80m",
		fmt.Sprint("-test.parallel=", max(1, processors/atOnce)),
	}, flags...)
	next := make(chan program)
	var running sync.WaitGroup
	var mu sync.Mutex // held while a result is printed
	var failed []string
	for range atOnce {
		running.Go(func() {
			for p := range next {
				result, ok := run(ctx, p, args)
				mu.Lock()
				_, _ = io.WriteString(to, result)
				if !ok {
					failed = append(failed, p.path)
				}
				mu.Unlock()
			}
		})
	}
	for _, p := range programs {
		if ctx.Err() == nil {
			next <- p
		}
	}
	close(next)
	running.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if len(failed) > 0 {
		slices.Sort(failed)
		return fmt.Errorf("%d of %d packages failed: %s", len(failed), len(programs), strings.Join(failed, " "))
	}
	return nil
}

// run runs one program, and returns what go test would print.
func run(ctx context.Context, p program, args []string) (result string, ok bool) {
	cmd := exec.CommandContext(ctx, p.file, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 30 * time.Second // a process that the tests left behind may hold the output open
	cmd.Dir = p.folder
	cmd.Env = append(os.Environ(), "PWD="+p.folder)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	began := time.Now()
	err := cmd.Run()
	took := time.Since(began).Seconds()
	if err != nil {
		return fmt.Sprintf("%s%v\nFAIL\t%s\t%.3fs\n", out.String(), err, p.path, took), false
	}
	if bytes.Contains(out.Bytes(), []byte("testing: warning: no tests to run")) {
		return fmt.Sprintf("ok  \t%s\t%.3fs [no tests to run]\n", p.path, took), true
	}
	return fmt.Sprintf("ok  \t%s\t%.3fs\n", p.path, took), true
}
