//! The part of kubectl's JSONPath templates that `get --output` supports: text, `{.a.b}`, `{.a[*].b}`, `{.a[0]}`,
//! `{.a['b\.c']}`, `{range .a[*]}` with `{end}`, and quoted text in braces. A missing field prints nothing.

use serde_json::Value;

/// Ranges within ranges.
const MAX_DEPTH: usize = 32;

#[derive(Clone, Debug)]
pub(crate) struct Template(Vec<Node>);

#[derive(Clone, Debug)]
enum Node {
    Text(String),
    Path(Vec<Step>),
    /// Nodes to print for each value of the path.
    Range(Vec<Step>, Vec<Node>),
}

#[derive(Clone, Debug)]
enum Step {
    Field(String),
    Index(usize),
    All,
}

impl Template {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        Parser(text).nodes(0).map(Self)
    }

    pub(crate) fn render(&self, value: &Value) -> String {
        render(&self.0, value)
    }
}

fn render(nodes: &[Node], value: &Value) -> String {
    let render_node = |node: &Node| match node {
        Node::Text(text) => text.clone(),
        Node::Path(path) => {
            let texts: Vec<String> = select(path, value).into_iter().map(to_text).collect();
            texts.join(" ")
        }
        Node::Range(path, body) => {
            let values = select(path, value).into_iter();
            values.map(|value| render(body, value)).collect()
        }
    };
    nodes.iter().map(render_node).collect()
}

/// Prints a text without quotes, and without control characters that could change the terminal.
fn to_text(value: &Value) -> String {
    let is_hidden = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    match value {
        Value::String(text) => text.replace(is_hidden, " "),
        other => other.to_string(),
    }
}

fn select<'v>(path: &[Step], value: &'v Value) -> Vec<&'v Value> {
    let mut selected = vec![value];
    for step in path {
        selected = selected
            .into_iter()
            .flat_map(|it| apply(step, it))
            .collect();
    }
    selected
}

fn apply<'v>(step: &Step, value: &'v Value) -> Vec<&'v Value> {
    match (step, value) {
        (Step::Field(name), _) => value.get(name).into_iter().collect(),
        (Step::Index(index), _) => value.get(*index).into_iter().collect(),
        (Step::All, Value::Array(items)) => items.iter().collect(),
        (Step::All, Value::Object(fields)) => fields.values().collect(),
        (Step::All, _) => Vec::new(),
    }
}

/// The rest of a template.
struct Parser<'a>(&'a str);

impl<'a> Parser<'a> {
    /// Parses up to the end of the template, or of the range at this depth.
    fn nodes(&mut self, depth: usize) -> Result<Vec<Node>, String> {
        if depth > MAX_DEPTH {
            return Err(format!("more than {MAX_DEPTH} ranges are in each other"));
        }
        let in_range = depth > 0;
        let mut nodes = Vec::new();
        loop {
            nodes.push(Node::Text(self.take_until("{").to_owned()));
            match (self.takes("{"), self.takes("end}"), in_range) {
                (false, ..) if in_range => return Err("{range} has no {end}".to_owned()),
                (true, true, false) => return Err("{end} has no {range}".to_owned()),
                (false, ..) | (true, true, true) => return Ok(nodes),
                (true, false, _) => nodes.push(self.node(depth)?),
            }
        }
    }

    /// Parses a part in braces.
    fn node(&mut self, depth: usize) -> Result<Node, String> {
        self.0 = self.0.trim_start();
        if self.takes("range ") {
            let path = self.path()?;
            self.expect("}")?;
            return Ok(Node::Range(path, self.nodes(depth + 1)?));
        }
        let node = match self.quoted()? {
            Some(parts) => Node::Text(parts.join(".")),
            None => Node::Path(self.path()?),
        };
        self.expect("}")?;
        Ok(node)
    }

    fn path(&mut self) -> Result<Vec<Step>, String> {
        let mut path = Vec::new();
        let mut is_empty = !(self.takes("$") || self.takes("@"));
        loop {
            if self.takes("[*]") || self.takes(".*") {
                path.push(Step::All);
            } else if self.takes("[") {
                match self.quoted()? {
                    Some(names) => path.extend(names.into_iter().map(Step::Field)),
                    None => {
                        let index = self.take_until("]");
                        let index = index.parse().map_err(|_| unsupported(index))?;
                        path.push(Step::Index(index));
                    }
                }
                self.expect("]")?;
            } else if self.takes(".") {
                match self.take_until(" .,[]{}()$@'\"\\") {
                    "" if is_empty && self.0.starts_with('}') => {}
                    "" => return Err(unsupported(self.0)),
                    name => path.push(Step::Field(name.to_owned())),
                }
            } else {
                return match is_empty {
                    true => Err(unsupported(self.0)),
                    false => Ok(path),
                };
            }
            is_empty = false;
        }
    }

    /// Parses a text in quotes, or returns `None` if the next character is not a quote. As in kubectl, dots without
    /// a backslash separate fields.
    fn quoted(&mut self) -> Result<Option<Vec<String>>, String> {
        let mut rest = self.0.chars();
        let Some(quote @ ('"' | '\'')) = rest.next() else {
            return Ok(None);
        };
        let (mut parts, mut text) = (Vec::new(), String::new());
        loop {
            text.push(match rest.next() {
                Some('\\') => match rest.next() {
                    Some('n') => '\n',
                    Some('t') => '\t',
                    Some(c @ ('\\' | '"' | '\'' | '.')) => c,
                    _ => return Err("a backslash escapes only n, t, a dot or a quote".to_owned()),
                },
                Some(c) if c == quote => break,
                Some('.') => {
                    parts.push(std::mem::take(&mut text));
                    continue;
                }
                Some(c) => c,
                None => return Err(format!("the closing {quote} is missing")),
            });
        }
        self.0 = rest.as_str();
        parts.push(text);
        Ok(Some(parts))
    }

    fn take_until(&mut self, ends: &str) -> &'a str {
        let end = self.0.find(|c: char| ends.contains(c));
        let (taken, rest) = self.0.split_at(end.unwrap_or(self.0.len()));
        self.0 = rest;
        taken
    }

    fn takes(&mut self, token: &str) -> bool {
        let rest = self.0.strip_prefix(token);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn expect(&mut self, token: &str) -> Result<(), String> {
        self.0 = self.0.trim_start();
        match self.takes(token) {
            true => Ok(()),
            false => Err(unsupported(self.0)),
        }
    }
}

fn unsupported(rest: &str) -> String {
    format!(
        "{rest:?} is not supported; write text, {{.a.b}}, {{.a[*].b}}, {{.a[0]}}, {{.a['b\\.c']}}, {{range .a[*]}} with {{end}}, or {{\"\\n\"}}"
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn templates_print_fields_as_kubectl_does() {
        let item = |name: &str| {
            json!({
                "metadata": {"name": name, "labels": {"example.org/team": "a"}},
                "spec": {"paused": false, "replicas": 2},
                "notes": ["x", "two\nlines\u{1b}[31m"],
            })
        };
        let list = json!({"kind": "List", "items": [item("one"), item("two")]});
        for (template, expected) in [
            ("no braces", "no braces"),
            ("{.kind}", "List"),
            ("{$.kind}, { @.kind }!", "List, List!"),
            ("{.items[*].metadata.name}", "one two"),
            ("{.items[0].metadata.name}{'\\n'}", "one\n"),
            ("{.items[1]['metadata'][\"name\"]}", "two"),
            ("{.items[0]['metadata.name']}", "one"),
            ("{.items[0].metadata.labels['example.org/team']}", ""),
            (r"{.items[0].metadata.labels['example\.org/team']}", "a"),
            ("{.items[0].spec}", r#"{"paused":false,"replicas":2}"#),
            ("{.items[*].spec.*}", "false 2 false 2"),
            (
                "{range .items[*]}{.metadata.name}{\"\\t\"}{.spec.paused}{\"}\\n\"}{end}.",
                "one\tfalse}\ntwo\tfalse}\n.",
            ),
            ("{range .items[*]}{range .notes[0]}{.} {end}{end}", "x x "),
            ("{.items[1].notes[1]}", "two\nlines [31m"),
            ("[{.items[7].metadata.name}{.missing.field}{.kind.x}]", "[]"),
        ] {
            let output = Template::parse(template).unwrap().render(&list);
            assert_eq!(output, expected, "{template}");
        }
    }

    #[test]
    fn unsupported_template_is_refused_with_its_rest() {
        for (template, expected) in [
            ("{.a", "\"\" is not supported"),
            ("{", "\"\" is not supported"),
            ("{}", "\"}\" is not supported"),
            ("{..name}", "\".name}\" is not supported"),
            ("{.a..b}", "\".b}\" is not supported"),
            (r"{.a\.b}", "\"\\\\.b}\" is not supported"),
            ("{.items[0:2]}", "\"0:2\" is not supported"),
            ("{.items[-1]}", "\"-1\" is not supported"),
            ("{.a['b','c']}", "\",'c']}\" is not supported"),
            ("{.items[?(@.a==1)].b}", "\"?(@.a==1)\" is not supported"),
            ("{.a,.b}", "\",.b}\" is not supported"),
            ("{.a | .b}", "\"| .b}\" is not supported"),
            ("{range .items[*]}{.a}", "{range} has no {end}"),
            ("{.a}{end}", "{end} has no {range}"),
            ("{'a}", "the closing ' is missing"),
            (r"{'\x'}", "a backslash escapes"),
        ] {
            let error = Template::parse(template).unwrap_err();
            assert!(error.contains(expected), "{template}: {error}");
        }
        let deep = "{range .a}".repeat(50_000);
        let error = Template::parse(&deep).unwrap_err();
        assert!(error.starts_with("more than 32 ranges"), "{error}");
    }
}
