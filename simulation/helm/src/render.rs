//! Writes objects as YAML: with the values of a release, or as a template from which Helm renders the same text.

use serde_json::Value;

/// A variable of a test chart.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Variable {
    Release,
    Namespace,
    Revision,
    ChartVersion,
    /// Path of a value.
    Value(Vec<String>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TextPart {
    Text(String),
    Variable(Variable),
}

/// Values of the variables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scope<'a> {
    pub(crate) release: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) revision: u32,
    pub(crate) chart_version: &'a str,
    pub(crate) values: &'a Value,
}

/// Returns the template with all objects.
pub(crate) fn template(objects: &[Value]) -> String {
    let mut text = String::new();
    for object in objects {
        let condition = object["$when"].as_str().map(condition_path);
        if let Some(path) = &condition {
            text.push_str(&format!("{{{{- if {} }}}}\n", expression(path)));
        }
        text.push_str("---\n");
        if let Some(message) = object["$fail"].as_str() {
            text.push_str(&format!("{{{{ fail {} }}}}\n", Value::from(message)));
        }
        write_fields(&mut text, object, 0, None);
        if condition.is_some() {
            text.push_str("{{- end }}\n");
        }
    }
    text
}

/// Returns the text of one object. `None` if its condition doesn't hold.
///
/// # Errors
/// Returns the message of an object that fails the rendering.
pub(crate) fn document(object: &Value, scope: Scope<'_>) -> Result<Option<String>, String> {
    if let Some(condition) = object["$when"].as_str()
        && !is_true(find_value(scope.values, &condition_path(condition)))
    {
        return Ok(None);
    }
    if let Some(message) = object["$fail"].as_str() {
        return Err(message.to_owned());
    }
    let mut text = String::new();
    write_fields(&mut text, object, 0, Some(scope));
    Ok(Some(text))
}

fn write_fields(text: &mut String, object: &Value, indent: usize, scope: Option<Scope<'_>>) {
    for (key, value) in object.as_object().into_iter().flatten() {
        if !key.starts_with('$') {
            let head = format!("{}:", Value::from(key.as_str()));
            write_field(text, indent, &head, value, scope);
        }
    }
}

/// Writes a field or a list item. `scope` is `None` for a template.
fn write_field(
    text: &mut String,
    indent: usize,
    head: &str,
    value: &Value,
    scope: Option<Scope<'_>>,
) {
    let space = " ".repeat(indent);
    match value {
        Value::Object(map) if !map.is_empty() => {
            text.push_str(&format!("{space}{head}\n"));
            write_fields(text, value, indent + 2, scope);
        }
        Value::Array(items) if !items.is_empty() => {
            text.push_str(&format!("{space}{head}\n"));
            for item in items {
                write_field(text, indent + 2, "-", item, scope);
            }
        }
        Value::String(string) => {
            let parts = split_parts(string);
            match scope {
                Some(scope) => {
                    if let Some(scalar) = resolve(&parts, scope) {
                        text.push_str(&format!("{space}{head} {scalar}\n"));
                    }
                }
                None => write_template(text, &format!("{space}{head}"), &parts),
            }
        }
        _ => {
            text.push_str(&format!("{space}{head} {value}\n"));
        }
    }
}

/// Returns a string with the variables replaced, as JSON. `None` if a value is absent.
fn resolve(parts: &[TextPart], scope: Scope<'_>) -> Option<String> {
    if let [TextPart::Variable(Variable::Value(path))] = parts {
        return find_value(scope.values, path).map(Value::to_string);
    }
    let mut result = String::new();
    for part in parts {
        match part {
            TextPart::Text(text) => result.push_str(text),
            TextPart::Variable(Variable::Release) => result.push_str(scope.release),
            TextPart::Variable(Variable::Namespace) => result.push_str(scope.namespace),
            TextPart::Variable(Variable::Revision) => result.push_str(&scope.revision.to_string()),
            TextPart::Variable(Variable::ChartVersion) => result.push_str(scope.chart_version),
            TextPart::Variable(Variable::Value(path)) => match find_value(scope.values, path)? {
                Value::String(text) => result.push_str(text),
                other => result.push_str(&other.to_string()),
            },
        }
    }
    Some(Value::from(result).to_string())
}

fn write_template(text: &mut String, head: &str, parts: &[TextPart]) {
    let paths = parts.iter().filter_map(|part| match part {
        TextPart::Variable(Variable::Value(path)) => Some(path),
        _ => None,
    });
    let conditions: Vec<String> = paths
        .map(|path| format!("(ne (kindOf {}) \"invalid\")", expression(path)))
        .collect();
    if !conditions.is_empty() {
        text.push_str(&format!("{{{{- if and {} }}}}\n", conditions.join(" ")));
    }
    if let [TextPart::Variable(Variable::Value(path))] = parts {
        text.push_str(&format!("{head} {{{{ {} | toJson }}}}\n", expression(path)));
    } else {
        let result: String = parts.iter().map(template_part).collect();
        text.push_str(&format!("{head} \"{result}\"\n"));
    }
    if !conditions.is_empty() {
        text.push_str("{{- end }}\n");
    }
}

fn template_part(part: &TextPart) -> String {
    let variable = match part {
        TextPart::Text(text) => {
            let quoted = Value::from(text.as_str()).to_string();
            let inner = quoted.get(1..quoted.len() - 1);
            return inner.unwrap_or_default().to_owned();
        }
        TextPart::Variable(variable) => variable,
    };
    match variable {
        Variable::Release => "{{ .Release.Name }}".to_owned(),
        Variable::Namespace => "{{ .Release.Namespace }}".to_owned(),
        Variable::Revision => "{{ .Release.Revision }}".to_owned(),
        Variable::ChartVersion => "{{ .Chart.Version }}".to_owned(),
        Variable::Value(path) => format!("{{{{ {} }}}}", expression(path)),
    }
}

/// Returns a template's expression for a value. The parentheses make it safe if a parent is absent.
fn expression(path: &[String]) -> String {
    let mut expression = ".Values".to_owned();
    for name in path {
        expression = format!("({expression}.{name})");
    }
    expression
}

fn condition_path(condition: &str) -> Vec<String> {
    let path = condition.trim_start_matches('$');
    let path = path.strip_prefix("values.").unwrap_or(path);
    path.split('.').map(str::to_owned).collect()
}

/// Returns a value that is present and not null.
fn find_value<'a>(values: &'a Value, path: &[String]) -> Option<&'a Value> {
    let value = path
        .iter()
        .try_fold(values, |value, name| value.get(name))?;
    (!value.is_null()).then_some(value)
}

/// Returns whether a template's `if` accepts a value.
fn is_true(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null) => false,
        Some(Value::Bool(value)) => *value,
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(items)) => !items.is_empty(),
        Some(Value::Object(fields)) => !fields.is_empty(),
    }
}

fn split_parts(string: &str) -> Vec<TextPart> {
    const FIXED: [(&str, Variable); 4] = [
        ("RELEASE", Variable::Release),
        ("NAMESPACE", Variable::Namespace),
        ("REVISION", Variable::Revision),
        ("CHART_VERSION", Variable::ChartVersion),
    ];
    let mut parts = Vec::new();
    let mut segments = string.split('$');
    let mut text = segments.next().unwrap_or_default().to_owned();
    for segment in segments {
        let fixed = FIXED
            .into_iter()
            .find_map(|(name, variable)| Some((variable, segment.strip_prefix(name)?)));
        let split = fixed.or_else(|| {
            let (path, rest) = split_path(segment.strip_prefix("values.")?);
            Some((Variable::Value(path), rest))
        });
        let Some((variable, rest)) = split else {
            text.push('$');
            text.push_str(segment);
            continue;
        };
        if !text.is_empty() {
            parts.push(TextPart::Text(std::mem::take(&mut text)));
        }
        parts.push(TextPart::Variable(variable));
        rest.clone_into(&mut text);
    }
    if !text.is_empty() || parts.is_empty() {
        parts.push(TextPart::Text(text));
    }
    parts
}

/// Splits the path of a value from the text after it.
fn split_path(text: &str) -> (Vec<String>, &str) {
    let is_path_character = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    let end = text.find(|c| !is_path_character(c)).unwrap_or(text.len());
    let path = text.get(..end).unwrap_or_default().trim_end_matches('.');
    let rest = text.get(path.len()..).unwrap_or_default();
    (path.split('.').map(str::to_owned).collect(), rest)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn scope(values: &Value) -> Scope<'_> {
        Scope {
            release: "r",
            namespace: "n",
            revision: 7,
            chart_version: "1.2.3",
            values,
        }
    }

    #[test]
    fn variables_are_replaced_and_absent_values_omitted() {
        let object = json!({
            "name": "$RELEASE-a", "at": "$NAMESPACE/$REVISION ($CHART_VERSION)", "cost": "5 $",
            "replicas": "$values.a.replicas", "gone": "$values.a.gone", "in": ["x-$values.b.", "y"],
        });
        let values = json!({ "a": { "replicas": 3 }, "b": "two" });
        let text = document(&object, scope(&values)).unwrap().unwrap();
        let (read, unread) = krypton_helm::releases::manifest::read(&text);
        assert_eq!(unread, 0);
        assert_eq!(
            read,
            [json!({
                "name": "r-a", "at": "n/7 (1.2.3)", "cost": "5 $", "replicas": 3, "in": ["x-two.", "y"],
            })]
        );
    }

    #[test]
    fn condition_selects_object() {
        let object = json!({ "$when": "values.extra", "kind": "ConfigMap" });
        for (values, is_present) in [
            (json!({}), false),
            (json!({ "extra": false }), false),
            (json!({ "extra": "yes" }), true),
        ] {
            let text = document(&object, scope(&values)).unwrap();
            assert_eq!(text.is_some(), is_present, "{values}");
        }
    }
}
