package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Man pages are made of the same texts as the help: one page for each command that the help
// lists. The topics of the help are sections of them.

func newMan() *cobra.Command {
	return &cobra.Command{
		Use:     "man DIR",
		Short:   "Write the man pages into a directory",
		Long:    "Write the man pages into a directory, which is created if it does not exist.",
		Example: "  pgxlock man share/man/man1",
		Hidden:  true, // for those who build packages
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("one directory is expected, and not %d arguments", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return err
			}
			for name, page := range manPages(cmd.Root()) {
				if err := os.WriteFile(filepath.Join(args[0], name), []byte(page), 0o644); err != nil { //nolint:gosec // for everybody to read
					return err
				}
			}
			return nil
		},
	}
}

// manPages returns the pages of a command and of all below it, by file name.
func manPages(cmd *cobra.Command) map[string]string {
	pages := map[string]string{manName(cmd) + ".1": manPage(cmd)}
	for _, below := range cmd.Commands() {
		if below.IsAvailableCommand() {
			for name, page := range manPages(below) {
				pages[name] = page
			}
		}
	}
	return pages
}

// manName is the title of a command's page: git's commands have theirs so, too.
func manName(cmd *cobra.Command) string { return strings.ReplaceAll(cmd.CommandPath(), " ", "-") }

// manPage is one page in the language of man(7).
func manPage(cmd *cobra.Command) string {
	cmd.InitDefaultHelpFlag()
	var b strings.Builder
	fmt.Fprintf(&b, ".TH %s 1 \"\" %s \"pgxlock\"\n", roffQuoted(strings.ToUpper(manName(cmd))), roffQuoted(cmd.Root().Name()+" "+cmd.Root().Version))
	b.WriteString(".ad l\n.nh\n") // a flag that is broken into two lines cannot be searched for
	fmt.Fprintf(&b, ".SH NAME\n%s \\- %s\n", roff(manName(cmd)), roff(cmd.Short))
	fmt.Fprintf(&b, ".SH SYNOPSIS\n.B %s\n", roffQuoted(manSynopsis(cmd)))
	b.WriteString(".SH DESCRIPTION\n" + roffText(cmd.Long))
	if below := available(cmd); len(below) > 0 {
		b.WriteString(".SH COMMANDS\n")
		for _, group := range append(cmd.Groups(), &cobra.Group{Title: "Other:"}) {
			if len(cmd.Groups()) > 0 {
				fmt.Fprintf(&b, ".SS %s\n", roffQuoted(strings.TrimSuffix(group.Title, ":")))
			}
			for _, c := range below {
				if c.GroupID == group.ID {
					fmt.Fprintf(&b, ".TP\n.BR %s (1)\n%s\n", roffQuoted(manName(c)), roff(c.Short))
				}
			}
		}
	}
	b.WriteString(roffFlags(cmd))
	if cmd.Example != "" {
		b.WriteString(".SH EXAMPLES\n" + roffVerbatim(cmd.Example))
	}
	b.WriteString(".SH \"EXIT STATUS\"\n")
	for _, c := range exitCodes {
		fmt.Fprintf(&b, ".TP\n.B %s\n%s\n", roffQuoted(c.code), roff(c.meaning))
	}
	if !cmd.HasParent() {
		for _, topic := range cmd.Commands() {
			if topic.IsAdditionalHelpTopicCommand() && topic.Name() != "exit-codes" {
				fmt.Fprintf(&b, ".SH %s\n%s", roffQuoted(strings.ToUpper(topic.Name())), roffText(topic.Long))
			}
		}
	} else {
		fmt.Fprintf(&b, ".SH \"SEE ALSO\"\n.BR %s (1)\n", roffQuoted(manName(cmd.Parent())))
	}
	return b.String()
}

// manSynopsis is how a command is called.
func manSynopsis(cmd *cobra.Command) string {
	if cmd.HasSubCommands() {
		return cmd.CommandPath() + " COMMAND [flags]"
	}
	return cmd.UseLine()
}

// available returns the commands of a command that the help lists.
func available(cmd *cobra.Command) []*cobra.Command {
	return slices.DeleteFunc(slices.Clone(cmd.Commands()), func(c *cobra.Command) bool { return !c.IsAvailableCommand() })
}

// roffFlags is a section with the flags of a command, if it has any.
func roffFlags(cmd *cobra.Command) string {
	var b strings.Builder
	write := func(flag *pflag.Flag) {
		if flag.Hidden {
			return
		}
		kind, usage := pflag.UnquoteUsage(flag)
		name := `\fB` + roff("--"+flag.Name) + `\fR`
		if flag.Shorthand != "" {
			name = `\fB` + roff("-"+flag.Shorthand) + `\fR, ` + name
		}
		if kind != "" {
			name += ` \fI` + roff(kind) + `\fR`
		}
		if !slices.Contains([]string{"", "0", "false", "[]"}, flag.DefValue) {
			usage += " (default " + flag.DefValue + ")"
		}
		fmt.Fprintf(&b, ".TP\n%s\n%s\n", name, roff(usage))
	}
	cmd.LocalFlags().VisitAll(write)
	cmd.InheritedFlags().VisitAll(write)
	if b.Len() == 0 {
		return ""
	}
	return ".SH OPTIONS\n" + b.String()
}

// roffText makes paragraphs of a text of the help. Lines that are indented stay as they are.
func roffText(text string) string {
	var b strings.Builder
	for i, paragraph := range strings.Split(strings.Trim(text, "\n"), "\n\n") {
		if strings.HasPrefix(paragraph, "  ") || strings.HasPrefix(paragraph, "\t") {
			b.WriteString(roffVerbatim(paragraph))
			continue
		}
		if i > 0 {
			b.WriteString(".PP\n")
		}
		for line := range strings.Lines(paragraph + "\n") {
			b.WriteString(roff(strings.TrimSpace(line)) + "\n")
		}
	}
	return b.String()
}

// roffVerbatim keeps lines as they are.
func roffVerbatim(text string) string {
	var b strings.Builder
	b.WriteString(".PP\n.nf\n")
	for line := range strings.Lines(strings.Trim(text, "\n") + "\n") {
		b.WriteString(roff(strings.TrimSuffix(line, "\n")) + "\n")
	}
	return b.String() + ".fi\n"
}

// roff writes a text so that nothing of it is a command, and a minus can be copied.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`, "`", `\(ga`, "'", `\(aq`, "^", `\(ha`, "~", `\(ti`, "\t", "    ").Replace(text)
	if strings.HasPrefix(text, ".") {
		return `\&` + text
	}
	return text
}

// roffQuoted is a text as one argument of a macro.
func roffQuoted(text string) string { return `"` + strings.ReplaceAll(roff(text), `"`, `\(dq`) + `"` }
