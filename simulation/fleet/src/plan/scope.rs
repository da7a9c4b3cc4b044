//! The requests to which a fault of an API server applies.

use std::fmt;

use http::Method;

/// Requests of one kind, for some resources or for all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    pub verbs: Verbs,
    /// Plural names. None means all.
    pub resources: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verbs {
    #[default]
    All,
    /// Reads of one object.
    Gets,
    /// Lists and watches.
    Lists,
    /// Lists and watches of all namespaces, which are the largest.
    WideLists,
}

impl Scope {
    /// Reads words such as `to lists on tenants`.
    pub(super) fn parse(words: &[&str]) -> Option<Self> {
        let (verbs, rest) = match words {
            ["to", "gets", rest @ ..] => (Verbs::Gets, rest),
            ["to", "lists", rest @ ..] => (Verbs::Lists, rest),
            ["to", "wide-lists", rest @ ..] => (Verbs::WideLists, rest),
            rest => (Verbs::All, rest),
        };
        let resources = match rest {
            [] => Vec::new(),
            ["on", resources] => resources.split(',').map(str::to_owned).collect(),
            _ => return None,
        };
        Some(Self { verbs, resources })
    }

    /// Whether the fault applies to a request with this method and path.
    pub fn matches(&self, method: &Method, path: &str) -> bool {
        let (resource, subject) = parse_path(path);
        let has_verb = match self.verbs {
            Verbs::All => true,
            Verbs::Gets => method == Method::GET && subject == Subject::Object,
            Verbs::Lists => method == Method::GET && subject != Subject::Object,
            Verbs::WideLists => method == Method::GET && subject == Subject::Cluster,
        };
        let is_resource = |each: &String| Some(each.as_str()) == resource;
        has_verb && (self.resources.is_empty() || self.resources.iter().any(is_resource))
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.verbs {
            Verbs::All => {}
            Verbs::Gets => f.write_str(" to gets")?,
            Verbs::Lists => f.write_str(" to lists")?,
            Verbs::WideLists => f.write_str(" to wide-lists")?,
        }
        match self.resources.is_empty() {
            true => Ok(()),
            false => write!(f, " on {}", self.resources.join(",")),
        }
    }
}

/// The subject of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Subject {
    Object,
    /// The objects in one namespace.
    Namespace,
    /// All objects.
    Cluster,
}

/// The resource and the subject of a path.
fn parse_path(path: &str) -> (Option<&str>, Subject) {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let rest = match parts.as_slice() {
        ["api", _, rest @ ..] | ["apis", _, _, rest @ ..] => rest,
        _ => return (None, Subject::Object),
    };
    match rest {
        ["namespaces", _, resource] => (Some(resource), Subject::Namespace),
        ["namespaces", _, resource, ..] => (Some(resource), Subject::Object),
        [resource] => (Some(resource), Subject::Cluster),
        [resource, ..] => (Some(resource), Subject::Object),
        [] => (None, Subject::Object),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_concerns_its_verbs_and_resource() {
        let all = "/apis/mesh.openkcm.io/v1alpha1/tenants";
        let one = "/apis/mesh.openkcm.io/v1alpha1/namespaces/tenants/tenants/t0";
        let namespace = "/api/v1/namespaces/t0";
        let in_namespace = "/apis/mesh.openkcm.io/v1alpha1/namespaces/tenants/tenants";
        for (words, expected) in [
            ("", [true, true, true, true, true]),
            ("to gets", [false, true, true, false, false]),
            ("to lists", [true, false, false, true, false]),
            ("to wide-lists", [true, false, false, false, false]),
            ("to lists on tenants", [true, false, false, true, false]),
            ("to wide-lists on secrets", [false; 5]),
            (
                "to gets on namespaces,secrets",
                [false, false, true, false, false],
            ),
            ("on tenants", [true, true, false, true, false]),
        ] {
            let scope = Scope::parse(&words.split_whitespace().collect::<Vec<_>>()).unwrap();
            assert_eq!(scope.to_string().trim(), words);
            let matched = [
                scope.matches(&Method::GET, all),
                scope.matches(&Method::GET, one),
                scope.matches(&Method::GET, namespace),
                scope.matches(&Method::GET, in_namespace),
                scope.matches(&Method::POST, "/api/v1/namespaces/t0/secrets"),
            ];
            assert_eq!(matched, expected, "{words}");
        }
        assert_eq!(Scope::parse(&["on"]), None);
    }
}
