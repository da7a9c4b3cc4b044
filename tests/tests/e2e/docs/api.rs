//! The API pages: the fields of each kind, from the schema in its CRD.

use std::collections::BTreeSet;

use serde_json::Value;

use super::generated::{check, code, sentence, table};
use crate::docs_commands::pages::read;

const KINDS: [&str; 3] = ["edgecluster", "kryptondeployment", "tenant"];

/// Returns the CRD of a kind.
fn crd(kind: &str) -> Value {
    serde_saphyr::from_str(&read(&format!("crds/crds/{kind}s.mesh.openkcm.io.yaml"))).unwrap()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// Rows of a table, and the fields without a description.
#[derive(Default)]
struct Fields {
    rows: Vec<[String; 4]>,
    undescribed: Vec<String>,
}

impl Fields {
    fn add(&mut self, path: &str, schema: &Value, is_required: bool) {
        let is_conditions = path == "conditions";
        let mut description = sentence(self.description(path, schema));
        for limit in limits(schema, &description) {
            description = format!("{description} {limit}");
        }
        if is_conditions {
            description += " Each has the fields of a Kubernetes condition.";
        }
        let default = match (&schema["default"], is_required) {
            (Value::Null, true) => "required".to_owned(),
            (Value::Null, false) => String::new(),
            (value, _) => code(&value.to_string()),
        };
        let cells = [code(path), kind_of(schema), default, description];
        self.rows.push(cells.map(|cell| cell.trim().to_owned()));
        if !is_conditions {
            self.descend(path, schema);
        }
    }

    fn descend(&mut self, path: &str, schema: &Value) {
        let (prefix, schema) = match schema["items"].is_object() {
            true => (format!("{path}[]."), &schema["items"]),
            false => (format!("{path}."), schema),
        };
        let required: BTreeSet<&str> = schema["required"]
            .as_array()
            .map(|names| names.iter().filter_map(Value::as_str).collect())
            .unwrap_or_default();
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{prefix}{name}");
            let path = path.trim_start_matches('.');
            self.add(path, field, required.contains(name.as_str()));
        }
    }

    fn description<'a>(&mut self, path: &str, schema: &'a Value) -> &'a str {
        let own = text(schema, "description");
        if !own.is_empty() {
            return own;
        }
        let of_items = text(&schema["items"], "description");
        if of_items.is_empty() {
            self.undescribed.push(path.to_owned());
        }
        of_items
    }
}

fn kind_of(schema: &Value) -> String {
    let items = &schema["items"];
    let values = &schema["additionalProperties"];
    match (text(schema, "type"), text(schema, "format")) {
        ("array", _) => format!("list of {}s", kind_of(items)),
        ("object", _) if values.is_object() => format!("map of {}s", kind_of(values)),
        ("string", "date-time") => "time".to_owned(),
        (kind, _) => kind.to_owned(),
    }
}

/// Returns the limits of a field that its description leaves out.
fn limits(schema: &Value, description: &str) -> Vec<String> {
    let mut limits = Vec::new();
    let values = schema["enum"].as_array().into_iter().flatten();
    let values: Vec<String> = values.filter_map(Value::as_str).map(code).collect();
    if values.iter().any(|value| !description.contains(value)) {
        limits.push(format!("One of {}.", values.join(", ")));
    }
    for (key, unit) in [
        ("maxLength", "characters"),
        ("maxProperties", "entries"),
        ("maxItems", "entries"),
    ] {
        if let Some(most) = schema[key].as_u64() {
            limits.push(format!("At most {most} {unit}."));
        }
    }
    limits.extend(rules(schema));
    limits
}

/// Returns the messages with which the API server rejects an object.
fn rules(schema: &Value) -> Vec<String> {
    let rules = schema["x-kubernetes-validations"].as_array();
    let messages = rules
        .into_iter()
        .flatten()
        .map(|rule| text(rule, "message"));
    messages
        .map(|message| format!("Rule: {}", sentence(message)))
        .collect()
}

/// Returns the generated part of a kind's page.
fn part(kind: &str) -> String {
    let crd = crd(kind);
    let version = &crd["spec"]["versions"][0];
    let schema = &version["schema"]["openAPIV3Schema"];
    let names = &crd["spec"]["names"];
    let columns = version["additionalPrinterColumns"].as_array().unwrap();
    let columns = |is_wide: bool| {
        let listed = columns
            .iter()
            .filter(|column| column["priority"].is_u64() == is_wide);
        listed
            .map(|column| text(column, "name"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let wide_columns = match columns(true) {
        wide if wide.is_empty() => wide,
        wide => format!(". With `-o wide` also: {wide}"),
    };
    let mut part = format!(
        "{}\n\n- API version: `{}/{}`\n- Short name: `{}`\n- Scope: {}\n- Columns: {}{wide_columns}\n",
        text(schema, "description"),
        text(&crd["spec"], "group"),
        text(version, "name"),
        names["shortNames"][0].as_str().unwrap_or_default(),
        text(&crd["spec"], "scope"),
        columns(false),
    );
    for name in ["spec", "status"] {
        let schema = &schema["properties"][name];
        let mut fields = Fields::default();
        fields.descend("", schema);
        assert!(
            fields.undescribed.is_empty(),
            "{kind}: {:?}",
            fields.undescribed
        );
        let head = ["Field", "Type", "Default", "Description"];
        part += &format!(
            "\n## Fields of `{name}`\n\n{}\n",
            sentence(text(schema, "description"))
        );
        part += &format!("\n{}", table(head, &fields.rows));
        for rule in rules(schema) {
            part += &format!("\n{rule}\n");
        }
    }
    for rule in rules(schema) {
        part += &format!("\n{rule}\n");
    }
    part
}

#[test]
fn docs_api_pages_are_current() -> Result<(), String> {
    for kind in KINDS {
        check(&format!("api/{kind}.md"), &part(kind))?;
    }
    Ok(())
}
