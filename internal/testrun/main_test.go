//go:build unix

package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// fakes makes programs that are shell scripts, with so many bytes of tests.
func fakes(t *testing.T, scripts map[string]string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, script := range scripts {
		folder := filepath.Join(dir, "source", name)
		file := filepath.Join(dir, "0", "0", name+".test")
		for path, text := range map[string]string{
			file:                                    "#!/bin/sh\n" + script,
			file + ".package":                       "example.com/" + name + "\n" + folder,
			filepath.Join(folder, "some_test.go"):   strings.Repeat("x", len(script)),
			filepath.Join(folder, "testdata", "is"): "here",
		} {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

func TestResultsAreThoseOfGoTest(t *testing.T) {
	t.Parallel()
	dir := fakes(t, map[string]string{
		"good":  `cat testdata/is >/dev/null && [ "$PWD" = "$(pwd -P)" ] && echo PASS # in its folder`,
		"bad":   `echo "--- FAIL: TestX"; echo why >&2; exit 1`,
		"flags": `case "$*" in *-test.shuffle=on*-test.parallel=*-test.short) ;; *) echo "$*"; exit 1;; esac`,
		"empty": `echo "testing: warning: no tests to run"`,
	})
	var out strings.Builder
	err := runAll(t.Context(), dir, "", []string{"-test.short"}, &out)
	if err == nil || err.Error() != "1 of 4 packages failed: example.com/bad" {
		t.Errorf("error: %v", err)
	}
	for _, want := range []string{
		"ok  \texample.com/good\t", "ok  \texample.com/flags\t", "--- FAIL: TestX\nwhy\nexit status 1\nFAIL\texample.com/bad\t", "s [no tests to run]\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, out.String())
		}
	}
}

func TestOnlyMatchingPackagesRun(t *testing.T) {
	t.Parallel()
	dir := fakes(t, map[string]string{"this": "exit 0", "other": "exit 1"})
	var out strings.Builder
	if err := runAll(t.Context(), dir, "/this$", nil, &out); err != nil || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("%v:\n%s", err, out.String())
	}
	if err := runAll(t.Context(), dir, "nothing", nil, &out); err == nil {
		t.Error("nothing to run is no error")
	}
}

func TestLargestRunsFirst(t *testing.T) {
	t.Parallel()
	dir := fakes(t, map[string]string{"small": "exit", "large": strings.Repeat("#\n", 1000), "middle": strings.Repeat("#\n", 100)})
	programs, err := built(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	var order []string
	for _, p := range programs {
		order = append(order, filepath.Base(p.path))
	}
	if got := strings.Join(order, " "); got != "large middle small" {
		t.Errorf("order: %s", got)
	}
}

func TestInterruptEndsTheRun(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	begun, never := filepath.Join(t.TempDir(), "begun"), filepath.Join(t.TempDir(), "never")
	for _, pipe := range []string{begun, never} {
		if err := syscall.Mkfifo(pipe, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	dir := fakes(t, map[string]string{"endless": "echo begun >" + begun + "; exec cat " + never})
	done := make(chan error, 1)
	go func() { done <- runAll(ctx, dir, "", nil, io.Discard) }()
	if _, err := os.ReadFile(begun); err != nil { // returns once the program has written
		t.Fatal(err)
	}
	cancel()
	if err := <-done; err == nil {
		t.Error("a run that was interrupted has passed")
	}
}
