package main

import (
	"bytes"
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/spf13/cobra"
)

// FuzzFlags reads command lines, words separated by zero bytes, and runs none of their commands.
func FuzzFlags(f *testing.F) {
	for _, words := range [][]string{
		{},
		{"ls", "--kind", "lease", "-o", "json"},
		{"ls", "--sort="},
		{"serve", "--every", "1e99"},
		{"serve", "--listen", "\u009b"},
		{"run", "-n", "k", "--", "true"},
		{"evict", "k", "--reason", "\x1b[2J", "--pid", "99999999999"},
		{"acquire", "--ttl", "-1", "\xff"},
		{"migrate", "u\u202ep"},
		{"--nosuch\n"},
		{"once", "--every", "NaN"},
		{"tree", "--name", "#1,2"},
	} {
		f.Add(strings.Join(words, "\x00"))
	}
	f.Fuzz(func(t *testing.T, line string) {
		words := strings.Split(line, "\x00")
		if len(line) > 1000 || slices.ContainsFunc(words, func(word string) bool { return strings.HasPrefix(word, "__") || word == "completion" }) {
			return // cobra's own commands
		}
		root := newRoot()
		var disarm func(*cobra.Command)
		disarm = func(cmd *cobra.Command) {
			if cmd.Run != nil || cmd.RunE != nil {
				cmd.Run, cmd.RunE = nil, func(*cobra.Command, []string) error { return nil }
			}
			for _, below := range cmd.Commands() {
				disarm(below)
			}
		}
		disarm(root)
		var stdout, stderr bytes.Buffer
		root.SetIn(strings.NewReader(""))
		root.SetOut(&stdout)
		root.SetErr(&stderr)
		code := run(t.Context(), root, words)
		said := stderr.String()
		switch {
		case code == exitOK && said == "":
		case code != exitUsage || !strings.HasPrefix(said, "pgxlock: ") || strings.Count(said, "\n") != 1 || len(said) > 20*len(line)+2000 ||
			strings.ContainsFunc(strings.TrimSuffix(said, "\n"), func(r rune) bool { return !unicode.IsPrint(r) }):
			t.Errorf("%q: exit code %d, %q", words, code, said)
		}
	})
}

// FuzzDurations checks that a duration is read as the help shows it.
func FuzzDurations(f *testing.F) {
	for _, text := range []string{"", "90", "1h30m", "-0", "1e9", "NaN", "0x1p-2", "9223372036.854775807", "1_0", "5µs"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var read, again seconds
		if err := read.Set(text); err != nil {
			return
		}
		if err := again.Set(read.String()); err != nil || again != read {
			t.Errorf("%q is %s, which is read as %s: %v", text, &read, &again, err)
		}
		_, err := strconv.ParseFloat(text, 64)
		if want, err2 := time.ParseDuration(text + "s"); errors.Join(err, err2) == nil && (time.Duration(read)-want).Abs() > 10*time.Microsecond {
			t.Errorf("%q is %s, want %s", text, &read, want)
		}
	})
}
