//! Valid names of objects.

use crate::kind::Kind;

const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or \
    '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
    '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must \
    start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
    '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";

/// Returns why a name is invalid for this kind.
pub(crate) fn problem(kind: &Kind, name: &str) -> Option<&'static str> {
    if kind.group == "rbac.authorization.k8s.io" {
        let is_valid = !matches!(name, "." | "..") && !name.contains(['/', '%']);
        return (!is_valid).then_some("may not contain '/'");
    }
    if kind.is("", "namespaces") || kind.is("", "services") {
        return match name.len() > 63 {
            true => Some("must be no more than 63 characters"),
            false if is_label(name) => None,
            false if name.split('.').all(is_label) => Some("must not contain dots"),
            false => Some(LABEL),
        };
    }
    if name.len() > 253 {
        return Some("must be no more than 253 characters");
    }
    (!name.split('.').all(is_label)).then_some(SUBDOMAIN)
}

fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !text.is_empty() && text.chars().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}
