//! The OpenAPI 3.1 document, made from the list of routes.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, header};
use schemars::generate::SchemaSettings;
use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::problem::Problem;
use crate::routes::{Access, Route};

/// The routes that serve the document.
pub(crate) fn routes(document: &Value) -> Vec<Route> {
    let text: Arc<str> = document.to_string().into();
    let serve = move || {
        let text = text.clone();
        async move { json_text(&text) }
    };
    vec![Route::get("/openapi.json", Access::Public, serve)]
}

fn json_text(text: &str) -> Response {
    let kind = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, kind)], text.to_owned()).into_response()
}

/// Makes the document for these routes.
pub(crate) fn document(routes: &[Route]) -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    let problem = generator.subschema_for::<Problem>();
    let mut paths: Map<String, Value> = Map::new();
    for route in routes.iter().filter(|route| !route.doc.summary.is_empty()) {
        let operation = operation(route, &problem, &mut generator);
        let path = paths.entry(route.listed.path).or_insert_with(|| json!({}));
        path[route.listed.method.as_str().to_lowercase()] = operation;
    }
    let schemas = generator.take_definitions(true);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Everbus",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Publish, consume and operate events over HTTP. Errors are problem documents (RFC 9457) with stable codes.",
        },
        "servers": [{ "url": "/" }],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
        },
    })
}

fn operation(route: &Route, problem: &Schema, generator: &mut SchemaGenerator) -> Value {
    let (listed, doc) = (&route.listed, &route.doc);
    let mut operation = json!({
        "operationId": operation_id(listed.method.as_str(), listed.path),
        "summary": doc.summary,
    });
    let scope = match listed.access {
        Access::Public => None,
        Access::Scope(scope) | Access::Page(scope) => Some(scope),
    };
    if let Some(scope) = scope {
        operation["security"] = json!([{ "token": [] }]);
        operation["x-scope"] = json!(scope);
    }
    let mut parameters: Vec<Value> = path_names(listed.path)
        .map(|name| {
            json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } })
        })
        .collect();
    if let Some(query) = doc.query {
        parameters.extend(query_parameters(&query(generator)));
    }
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    if !doc.bodies.is_empty() {
        let mut content = Map::new();
        for (kind, schema) in &doc.bodies {
            let schema = schema.map_or_else(|| json!({}), |of| of(generator).to_value());
            content.insert((*kind).to_owned(), json!({ "schema": schema }));
        }
        operation["requestBody"] = json!({ "content": content });
    }
    let mut answer = json!({ "description": "it worked" });
    if let Some(returns) = doc.returns {
        let kind = doc.content_type.unwrap_or("application/json");
        answer["content"] = json!({ kind: { "schema": returns(generator).to_value() } });
    } else if let Some(kind) = doc.content_type {
        answer["content"] = json!({ kind: {} });
    }
    let refused = json!({
        "description": "a problem document",
        "content": { "application/problem+json": { "schema": problem } },
    });
    operation["responses"] = json!({ doc.status.to_string(): answer, "default": refused });
    if let Some(again) = doc.again {
        answer["description"] = json!("the same request was made before, and nothing was stored");
        operation["responses"][again.to_string()] = answer;
    }
    operation
}

/// The fields of an object as query parameters.
fn query_parameters(schema: &Schema) -> Vec<Value> {
    let properties = schema.get("properties").and_then(Value::as_object);
    let required = schema.get("required").and_then(Value::as_array);
    let is_required =
        |name: &str| required.is_some_and(|names| names.iter().any(|required| required == name));
    let fields = properties.into_iter().flatten();
    fields
        .map(|(name, schema)| {
            let mut schema = schema.clone();
            let about = schema
                .as_object_mut()
                .and_then(|schema| schema.remove("description"));
            // A query parameter can be absent, but not null.
            if let Some(Value::Array(kinds)) = schema.get_mut("type") {
                kinds.retain(|kind| kind != "null");
            }
            let mut parameter =
                json!({ "name": name, "in": "query", "required": is_required(name), "schema": schema });
            if let Some(about) = about {
                parameter["description"] = about;
            }
            parameter
        })
        .collect()
}

fn path_names(path: &str) -> impl Iterator<Item = &str> {
    path.split('/')
        .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
}

/// The id of an operation: `GET /v1/events/{id}` becomes `get_events_id`.
fn operation_id(method: &str, path: &str) -> String {
    let words = path
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty() && *word != "v1");
    let mut id = method.to_lowercase();
    for word in words {
        id.push('_');
        id.push_str(word);
    }
    id
}
