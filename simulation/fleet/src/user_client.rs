//! Requests of people to API servers.

use bytes::Bytes;
use http::{Method, Request};
use serde_json::{Value, json};

use crate::conductor::Simulation;
use crate::plan::HOME;

/// User agent of all requests of people.
pub const PEOPLE: &str = "people/1.0";
const MERGE_PATCH: &str = "application/merge-patch+json";
const JSON: &str = "application/json";

/// A client of people for one cluster. No link delays its requests, and no fault of the API server affects them.
#[derive(Debug)]
pub struct UserClient<'a> {
    pub simulation: &'a mut Simulation,
    pub cluster: &'a str,
}

impl<'a> UserClient<'a> {
    pub fn new(simulation: &'a mut Simulation, cluster: &'a str) -> Self {
        Self {
            simulation,
            cluster,
        }
    }

    /// Returns a client for the home cluster.
    pub fn for_home(simulation: &'a mut Simulation) -> Self {
        Self {
            simulation,
            cluster: HOME,
        }
    }

    /// Sends a request. Returns the code and the body, `Null` if it is not JSON.
    pub fn send(
        &mut self,
        method: Method,
        path: &str,
        content_type: &str,
        body: &Value,
    ) -> (u16, Value) {
        let bytes = match body {
            Value::Null => Bytes::new(),
            body => Bytes::from(body.to_string()),
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("user-agent", PEOPLE)
            .header("accept", JSON)
            .header("content-type", content_type)
            .body(bytes);
        let Ok(request) = request else {
            return (0, Value::Null);
        };
        match self.simulation.request(self.cluster, &request) {
            Some(response) => {
                let body = serde_json::from_slice(response.body()).unwrap_or_default();
                (response.status().as_u16(), body)
            }
            None => (0, Value::Null),
        }
    }

    pub fn create(&mut self, path: &str, object: &Value) -> u16 {
        self.send(Method::POST, path, JSON, object).0
    }

    pub fn patch(&mut self, path: &str, patch: &Value) -> u16 {
        self.send(Method::PATCH, path, MERGE_PATCH, patch).0
    }

    /// Sets an annotation, or removes it if the value is null.
    pub fn annotate(&mut self, path: &str, key: &str, value: impl Into<Value>) -> u16 {
        let value = value.into();
        self.patch(path, &json!({"metadata": {"annotations": {key: value}}}))
    }

    pub fn replace(&mut self, path: &str, object: &Value) -> u16 {
        self.send(Method::PUT, path, JSON, object).0
    }

    pub fn delete(&mut self, path: &str) -> u16 {
        self.send(Method::DELETE, path, JSON, &Value::Null).0
    }

    pub fn get(&mut self, path: &str) -> Option<Value> {
        let (code, body) = self.send(Method::GET, path, JSON, &Value::Null);
        (code == 200).then_some(body)
    }
}
