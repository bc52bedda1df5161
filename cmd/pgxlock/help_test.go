package main

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// listed returns the commands of this program that the help lists and that do something: those
// of cobra have texts of their own.
func listed(root *cobra.Command) []*cobra.Command {
	return slices.DeleteFunc(all(root), func(cmd *cobra.Command) bool {
		return !cmd.IsAvailableCommand() || strings.HasPrefix(cmd.CommandPath(), "pgxlock completion")
	})
}

func TestCommandsHaveHelpAndAnExample(t *testing.T) {
	t.Parallel()
	root := newRoot()
	root.InitDefaultCompletionCmd()
	commands := append(listed(root), newHelp())
	for _, path := range []string{"run", "migrate sql"} {
		if !slices.ContainsFunc(commands, func(cmd *cobra.Command) bool { return cmd.CommandPath() == "pgxlock "+path }) {
			t.Errorf("%s is not looked at", path)
		}
	}
	for _, cmd := range commands {
		_, runs := shownCommands(cmd.Example)
		if cmd.Short == "" || cmd.Long == "" || !cmd.HasSubCommands() && runs == 0 {
			t.Errorf("%s: help %q, %q, example %q", cmd.CommandPath(), cmd.Short, cmd.Long, cmd.Example)
		}
	}
}

// A terminal breaks a line that is longer in the middle of a word.
func TestHelpFitsTheScreen(t *testing.T) {
	t.Parallel()
	root := newRoot()
	root.InitDefaultCompletionCmd()
	for _, cmd := range all(root) {
		cmd.InitDefaultHelpFlag()
		text := helpText(cmd, 80)
		for line := range strings.Lines(text) {
			if line = strings.TrimSuffix(line, "\n"); len(line) > 80 && !strings.HasPrefix(line, "https://") {
				t.Errorf("%s: a line has %d columns: %q", cmd.CommandPath(), len(line), line)
			}
		}
		want := cmp.Or(cmd.Long, cmd.Short)
		if cmd.Runnable() || cmd.HasSubCommands() {
			want += " " + cmd.UsageString()
		}
		if !slices.Equal(strings.Fields(text), strings.Fields(want)) {
			t.Errorf("%s: the help has other words than its texts:\n%s", cmd.CommandPath(), text)
		}
	}
}

func TestHelpIsBrokenBetweenWords(t *testing.T) {
	t.Parallel()
	cmd := &cobra.Command{Use: "do", Long: "Do what is to be done, in\nthe order of the list:\n\n  one   the first thing that is done\n  two   another", Example: "  do it --without a --break", Run: func(*cobra.Command, []string) {}}
	cmd.Flags().String("name", "", "the `name` of all that is done")
	const want = `Do what is to be
done, in the order
of the list:

  one   the first
        thing that
        is done
  two   another

Usage:
  do [flags]

Examples:
  do it --without a --break

Flags:
      --name name   the
                    name
                    of
                    all
                    that
                    is
                    done
`
	if got := helpText(cmd, 20); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

// An identifier in a help text is one that a renaming put there.
func TestHelpHasNoIdentifiers(t *testing.T) {
	t.Parallel()
	identifier := regexp.MustCompile(`\b[a-z]+[A-Z]\w*`)
	for _, cmd := range all(newRoot()) {
		texts := []string{cmd.Short, cmd.Long}
		cmd.LocalFlags().VisitAll(func(flag *pflag.Flag) { texts = append(texts, flag.Usage) })
		if found := identifier.FindString(strings.Join(texts, "\n")); found != "" {
			t.Errorf("%s: the help has %q", cmd.CommandPath(), found)
		}
	}
}

func TestHelpGroupsCommands(t *testing.T) {
	t.Parallel()
	r := execute(t, nil, "--help")
	for _, want := range []string{
		"Lock:\n  acquire ", "Inspect:\n  doctor ", "Operate:\n  claims ",
		"Additional help topics:\n  pgxlock environment ", "\n  pgxlock exit-codes ", "\n  pgxlock json ",
	} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("there is no %q in\n%s", want, r.stdout)
		}
	}
	if _, additional, _ := strings.Cut(r.stdout, "Additional Commands:"); !regexp.MustCompile(`\A\s+completion .*\n\s+help .*\n\s+version .*\n\n`).MatchString(additional) {
		t.Errorf("other commands without a group:\n%s", additional)
	}
}

func TestHelpOfTopics(t *testing.T) {
	t.Parallel()
	execute(t, nil, "help", "exit-codes").want(t, exitOK, "75      busy", "")
	execute(t, nil, "exit-codes").want(t, exitOK, "75      busy", "")
	execute(t, nil, "help", "environment").want(t, exitOK, "PGXLOCK_DATABASE_URL", "")
	execute(t, nil, "help", "json").want(t, exitOK, "2^53", "")
	execute(t, nil, "help", "migrate", "up").want(t, exitOK, "pgxlock migrate up [flags]", "")
	execute(t, nil, "help").want(t, exitOK, "Inspect:", "")
	execute(t, nil, "help", "evcit").want(t, exitUsage, "", `no help for "evcit"; did you mean evict? (see`)
	execute(t, nil, "help", "migrate", "sideways").want(t, exitUsage, "", `no help for "sideways"`)
	execute(t, nil, "__complete", "help", "e").want(t, exitOK, "exit-codes", "Completion ended")
}

// Every code that the program has a name for is in the list, and the page lists the same.
func TestExitCodesAreListedInHelpAndInTheDocument(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/run.md")
	if err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	want.WriteString("| code | |\n|---|---|\n")
	help := listExitCodes()
	for _, c := range exitCodes {
		want.WriteString("| " + c.code + " | " + strings.ReplaceAll(c.meaning, "|", `\|`) + " |\n")
		if !strings.Contains(help, "  "+c.code+" ") {
			t.Errorf("help does not list %s:\n%s", c.code, help)
		}
	}
	if !strings.Contains(string(text), want.String()+"\n") {
		t.Errorf("docs/run.md does not have this table:\n%s", want.String())
	}
	source, err := os.ReadFile("exit.go")
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile(`(?m)^\texit[A-Z]\w+ += (\d+)`).FindAllStringSubmatch(string(source), -1)
	if len(named) < 10 {
		t.Errorf("only %d codes are found in exit.go", len(named))
	}
	for _, m := range named {
		if !slices.ContainsFunc(exitCodes, func(c struct{ code, meaning string }) bool { return strings.TrimSuffix(c.code, "+n") == m[1] }) {
			t.Errorf("%s is not listed", m[0])
		}
	}
}

// shownCommands returns the commands of ours in a text that a shell would read, each as its
// words, and how many there are. Variables are those that acquire fills.
func shownCommands(text string) (commands [][]string, n int) {
	for line := range strings.Lines(text) {
		for _, begin := range regexp.MustCompile(`\bpgxlock `).FindAllStringIndex(line, -1) {
			commands = append(commands, words(line[begin[0]:]))
		}
	}
	return commands, len(commands)
}

// words splits a line into the words of its first command, as a shell does.
func words(line string) (words []string) {
	var word strings.Builder
	quote, inWord := rune(0), false
	end := func() {
		if inWord {
			words = append(words, strings.NewReplacer("$holder", "me", "$token", "7").Replace(word.String()))
		}
		word.Reset()
		inWord = false
	}
	for _, r := range line {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(r)
		case r == '"' || r == '\'':
			quote, inWord = r, true
		case r == ' ' || r == '\n':
			end()
		case strings.ContainsRune("|;&)>", r), r == '#' && !inWord:
			end()
			return words
		default:
			word.WriteRune(r)
			inWord = true
		}
	}
	end()
	return words
}

func TestWordsOfExamplesAreThoseOfAShell(t *testing.T) {
	t.Parallel()
	for line, want := range map[string][]string{
		`pgxlock ls -o json | jq -r '.[].key'`:                {"pgxlock", "ls", "-o", "json"},
		`pgxlock evict '#42' --reason 'a b' # why`:            {"pgxlock", "evict", "#42", "--reason", "a b"},
		`pgxlock release k --holder "$holder" --token $token`: {"pgxlock", "release", "k", "--holder", "me", "--token", "7"},
		`pgxlock acquire nightly --ttl 5m) || exit`:           {"pgxlock", "acquire", "nightly", "--ttl", "5m"},
		`pgxlock ls --exit-code >/dev/null; do sleep 1; done`: {"pgxlock", "ls", "--exit-code"},
	} {
		if got := words(line); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
}

// Each command in an example, and in the page of run, is run where there is no server: it gets
// as far as that if its flags and arguments are right.
func TestExamplesAreAccepted(t *testing.T) {
	t.Parallel()
	root := newRoot()
	var texts []string
	for _, cmd := range append(listed(root), newHelp()) {
		texts = append(texts, cmd.Example)
	}
	page, err := os.ReadFile("../../docs/run.md")
	if err != nil {
		t.Fatal(err)
	}
	for i, part := range strings.Split(string(page), "```") {
		if i%2 == 1 {
			texts = append(texts, strings.TrimPrefix(part, "sh"))
		}
	}
	commands, n := shownCommands(strings.Join(texts, "\n"))
	if n < 30 {
		t.Errorf("only %d examples are found", n)
	}
	for _, words := range commands {
		line := strings.Join(words, " ")
		t.Run(line, func(t *testing.T) {
			t.Parallel()
			args := words[1:]
			switch args[0] {
			case "serve", "lead": // which would be a server, or wait for one
				parses(t, args)
				return
			case "evict": // there is no terminal
				args = append(args, "--yes")
			}
			waits := slices.ContainsFunc(args, func(word string) bool { return word == "-w" || strings.HasPrefix(word, "--wait") }) // for a server, too
			if testing.Short() || waits {
				parses(t, args)
				return
			}
			cmd := program(t, []string{"DATABASE_URL=postgres://me@" + closed + "/db"}, args...)
			cmd.Dir = t.TempDir()
			for i, word := range args {
				path := filepath.Join(cmd.Dir, word)
				switch {
				case strings.HasPrefix(word, "./"):
					if err := os.WriteFile(path, []byte("#!/bin/sh\n"), 0o755); err != nil {
						t.Fatal(err)
					}
				case i > 0 && args[i-1] == "--dir":
					if err := os.MkdirAll(path, 0o755); err != nil {
						t.Fatal(err)
					}
				}
			}
			if r := finish(t, cmd); r.code != exitOK && (r.code != exitUnavailable || !strings.Contains(r.stderr, "connection refused")) {
				t.Errorf("exit code %d: %s", r.code, r.stderr)
			}
		})
	}
}

// parses fails the test unless flags and arguments are right. The command does nothing.
func parses(t *testing.T, args []string) {
	t.Helper()
	root := newRoot()
	cmd, _, err := root.Find(args)
	if err != nil {
		t.Fatal(err)
	}
	cmd.RunE = func(*cobra.Command, []string) error { return nil }
	if code := run(context.Background(), root, args); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}
