package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestManPagesAreThoseOfTheHelp(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "man")
	execute(t, nil, "man", dir).want(t, exitOK, "", "")
	root := newRoot()
	for _, cmd := range listed(root) {
		text, err := os.ReadFile(filepath.Join(dir, manName(cmd)+".1"))
		if err != nil {
			t.Error(err)
			continue
		}
		page := strings.ReplaceAll(string(text), `\-`, "-")
		wants := []string{"\n.SH NAME\n" + manName(cmd) + " - ", "\n.SH SYNOPSIS\n", "\n.SH \"EXIT STATUS\"\n"}
		cmd.LocalFlags().VisitAll(func(flag *pflag.Flag) { wants = append(wants, `\fB--`+flag.Name+`\fR`) })
		for _, c := range exitCodes {
			wants = append(wants, ".B \""+c.code+"\"\n"+c.meaning+"\n")
		}
		if cmd.Example != "" {
			wants = append(wants, "\n.SH EXAMPLES\n")
		}
		for _, want := range wants {
			if !strings.Contains(page, want) {
				t.Errorf("%s lacks %q", manName(cmd), want)
			}
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "pgxlock.1"))
	for _, want := range []string{".SH \"ENVIRONMENT\"\n", ".SH \"JSON\"\n", ".SS \"Inspect\"\n"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("pgxlock.1 lacks %q: %v", want, err)
		}
	}
}

func TestManPagesAreOfTheLanguageOfMan(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	if _, err := exec.LookPath("groff"); err != nil {
		pgtest.Missing(t, "groff", "groff(1) reads man pages")
	}
	dir := t.TempDir()
	execute(t, nil, "man", dir).want(t, exitOK, "", "")
	paths, err := filepath.Glob(filepath.Join(dir, "*.1"))
	if err != nil || len(paths) < 15 {
		t.Fatalf("%d pages: %v", len(paths), err)
	}
	for _, path := range paths {
		if out, err := exec.CommandContext(t.Context(), "groff", "-man", "-ww", "-Wbreak", "-z", "-Tascii", path).CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s: %v\n%s", path, err, out)
		}
	}
}

func TestRoffTextIsShownAsItIs(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		".SH is no heading": `\&.SH is no heading`,
		"'quoted'":          `\(aqquoted\(aq`,
		`a\b -c ~ ^`:        `a\eb \-c \(ti \(ha`,
	} {
		if got := roff(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
