// Command lua runs the script in its argument as a health check of Argo CD, on an object that it reads as JSON from
// standard input. It prints the health: the status, a tab, and the message. As in Argo CD, the script has only the
// libraries package, base and table.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	lua "github.com/yuin/gopher-lua"
)

// The statuses that Argo CD accepts from a script.
var statuses = []string{"Healthy", "Progressing", "Degraded", "Suspended", "Missing", "Unknown"}

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "lua:", err)
		os.Exit(1)
	}
}

func run(args []string, in io.Reader, out io.Writer) error {
	if len(args) != 1 {
		return errors.New("usage: lua SCRIPT < OBJECT")
	}
	var object map[string]any
	if err := json.NewDecoder(in).Decode(&object); err != nil {
		return err
	}
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	// The other libraries need the first.
	for _, library := range []struct {
		name string
		open lua.LGFunction
	}{
		{lua.LoadLibName, lua.OpenPackage},
		{lua.BaseLibName, lua.OpenBase},
		{lua.TabLibName, lua.OpenTable},
	} {
		call := lua.P{Fn: state.NewFunction(library.open), Protect: true}
		if err := state.CallByParam(call, lua.LString(library.name)); err != nil {
			return err
		}
	}
	state.SetGlobal("obj", value(state, object))
	if err := state.DoString(args[0]); err != nil {
		return err
	}
	health, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		return fmt.Errorf("the script returned %s instead of a table", state.Get(-1).Type())
	}
	status := lua.LVAsString(health.RawGetString("status"))
	if !slices.Contains(statuses, status) {
		return fmt.Errorf("the script returned the unknown status %q", status)
	}
	fmt.Fprintf(out, "%s\t%s\n", status, lua.LVAsString(health.RawGetString("message")))
	return nil
}

func value(state *lua.LState, decoded any) lua.LValue {
	switch decoded := decoded.(type) {
	case bool:
		return lua.LBool(decoded)
	case float64:
		return lua.LNumber(decoded)
	case string:
		return lua.LString(decoded)
	case []any:
		table := state.CreateTable(len(decoded), 0)
		for _, item := range decoded {
			table.Append(value(state, item))
		}
		return table
	case map[string]any:
		table := state.CreateTable(0, len(decoded))
		for key, item := range decoded {
			table.RawSetString(key, value(state, item))
		}
		return table
	default:
		return lua.LNil
	}
}
